"""Figures of the last minutes from the request log: who was refused and why, and how long requests queued.

Both read a bounded number of the newest rows by an index, so they take the same time for any size of the log.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.requests.request_log import id_at
from accounting.tables.request_models import RequestLog
from accounting.values import timelines
from accounting.values.types import Tier

MAX_FAILED_ROWS = 5_000
MAX_TIMED_ROWS = 500


class Refused(NamedTuple):
    """Requests of one tenant that were refused with 429 for one reason."""

    tenant_id: str
    error_code: str
    num_requests: int


class Queued(NamedTuple):
    """How long requests of one tenant waited in a worker until they began, in milliseconds."""

    num_requests: int
    mean_ms: float
    longest_ms: float


async def refused(conn: AsyncConnection, since_ms: int) -> list[Refused]:
    """Returns who was refused, the most frequent first, of the newest `MAX_FAILED_ROWS` failed and slow requests."""
    log = RequestLog
    newest = (
        select(log.tenant_id, log.error_code, log.outcome)
        .where(log.is_tail, log.request_id >= id_at(since_ms))
        .order_by(log.request_id.desc())
        .limit(MAX_FAILED_ROWS)
        .subquery()
    ).c
    query = select(newest.tenant_id, newest.error_code, func.count()).where(newest.outcome == "refused")
    query = query.group_by(newest.tenant_id, newest.error_code)
    found = [Refused(*row) for row in await conn.execute(query)]
    return sorted(found, key=lambda one: (-one.num_requests, one.tenant_id, one.error_code))


async def queued(conn: AsyncConnection, since_ms: int, tier: Tier) -> dict[str, Queued]:
    """Returns the waits by tenant, of the newest `MAX_TIMED_ROWS` requests of all tenants."""
    log = RequestLog
    query = select(log.tenant_id, log.tier, log.timeline).where(log.request_id >= id_at(since_ms))
    waits: dict[str, list[float]] = {}
    for tenant_id, of_tier, packed in await conn.execute(query.order_by(log.request_id.desc()).limit(MAX_TIMED_ROWS)):
        timeline = timelines.unpack(packed)
        if of_tier == tier and timeline.worker:
            phases = timelines.phases(timeline)
            waits.setdefault(tenant_id, []).append(
                sum(phase.end_us - phase.start_us for phase in phases if phase.name == "queue") / 1000
            )
    return {tenant_id: Queued(len(ms), sum(ms) / len(ms), max(ms)) for tenant_id, ms in waits.items()}
