"""How many of the newest requests for work failed, and why, from the request log. A bounded number of rows is looked
at. Requests that only read, such as those of dashboards, do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import func, literal, select, union_all
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.requests.request_log import id_at
from accounting.tables.request_models import RequestLog

MAX_REQUESTS = 5_000
WORK = "POST /v1/%"
"""The endpoints that do work for a tenant."""
FAILED_FROM = 400
"""The first status of a failed request; 499 stands for a client that left."""


class Cause(msgspec.Struct, frozen=True):
    """Failed requests of one kind."""

    status: int
    outcome: str
    error_code: str
    num_requests: int


class Failures(msgspec.Struct, frozen=True):
    num_requests: int
    """The number of requests for work among those that were looked at."""
    num_failed: int
    since_ms: int
    """The start of the oldest request that was looked at; the asked start if all of them were."""
    causes: Sequence[Cause]
    """The most frequent first."""


async def of_newest(conn: AsyncConnection, since_ms: int, tenant_id: str | None, num_causes: int) -> Failures:
    """Looks at the newest requests that were accepted from `since_ms` on, at most `MAX_REQUESTS`. Without `tenant_id`
    they are those of all tenants."""
    runs = [_newest(since_ms, tenant_id, is_tail).subquery() for is_tail in (True, False)]
    both = union_all(*(select(run) for run in runs)).subquery()
    newest = select(both).order_by(both.c.request_id.desc()).limit(MAX_REQUESTS).subquery()
    kinds = (newest.c.status, newest.c.outcome, newest.c.error_code, newest.c.endpoint.like(WORK).label("is_work"))
    query = select(*kinds, func.count(literal(1)).label("count"), func.min(newest.c.started_at_ms).label("oldest_ms"))
    rows = (await conn.execute(query.group_by(*kinds))).all()
    num_looked_at = sum(row._mapping["count"] for row in rows)
    found = [Cause(row.status, row.outcome, row.error_code, row._mapping["count"]) for row in rows if row.is_work]
    failed = [cause for cause in found if cause.status >= FAILED_FROM]
    failed.sort(key=lambda cause: (-cause.num_requests, cause.status, cause.error_code))
    return Failures(
        sum(cause.num_requests for cause in found),
        sum(cause.num_requests for cause in failed),
        since_ms if num_looked_at < MAX_REQUESTS else min(row.oldest_ms for row in rows),
        failed[:num_causes],
    )


def _newest(since_ms: int, tenant_id: str | None, is_tail: bool) -> Any:
    """Selects the newest rows of one run of an index."""
    query = select(
        RequestLog.request_id,
        RequestLog.started_at_ms,
        RequestLog.endpoint,
        RequestLog.status,
        RequestLog.outcome,
        RequestLog.error_code,
    ).where(RequestLog.is_tail == is_tail, RequestLog.request_id >= id_at(since_ms))
    if tenant_id is not None:
        query = query.where(RequestLog.tenant_id == tenant_id)
    return query.order_by(RequestLog.request_id.desc()).limit(MAX_REQUESTS)
