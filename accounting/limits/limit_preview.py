"""A preview of a rate limit: which of a tenant's requests of the last days it would have refused.

It counts from the rollups by minute, and so approximately. A minute is one of the clock, while the limiter's window slides;
requests that were refused then are not among them; in a minute with too many tokens all requests count as equally
large; and nobody comes back who was refused. Batches are left out, because no such limit binds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import among
from accounting.ledger.rollups import SECONDS
from accounting.tables.models import RollupHour, RollupMinute
from accounting.values.types import TOKEN_CLASSES, Limits

NUM_HOURS = 7 * 24


class Use(msgspec.Struct, frozen=True):
    """The use of a tenant in one minute or hour."""

    bucket: int
    """The first Unix second."""
    num_requests: int
    num_tokens: int


class Preview(msgspec.Struct, frozen=True):
    start: int
    end: int
    """The Unix seconds [start, end) that were looked at."""
    num_requests: int
    num_refused: int
    num_minutes: int
    """The minutes in which something would have been refused."""


async def preview(conn: AsyncConnection, tenant_id: str, limits: Limits, now: int, model: str | None = None) -> Preview:
    """Looks at the last 7 days, the current hour included. With `model` only requests count that its limits bind."""
    width = SECONDS["1h"]
    end = now - now % width + width
    hours = range(end - NUM_HOURS * width, end, width)
    by_hour = await _used(conn, RollupHour, hours, tenant_id, model)
    # A minute uses at most what its hour used, so few hours are looked into.
    crowded = [hour.bucket for hour in by_hour if num_refused(hour, limits)]
    minutes = [second for hour in crowded for second in range(hour, hour + width, SECONDS["1m"])]
    refused = [num_refused(one, limits) for one in await _used(conn, RollupMinute, minutes, tenant_id, model)]
    num_requests = sum(hour.num_requests for hour in by_hour)
    return Preview(hours.start, end, num_requests, sum(refused), sum(map(bool, refused)))


def num_refused(used: Use, limits: Limits) -> int:
    """Returns how many requests of a minute the limits on requests and tokens would have refused."""
    refused = 0
    if limits.requests_per_minute is not None:
        refused = max(0, used.num_requests - limits.requests_per_minute)
    if limits.tokens_per_minute is not None and used.num_tokens > limits.tokens_per_minute:
        too_many = used.num_tokens - limits.tokens_per_minute
        refused = max(refused, -(-used.num_requests * too_many // used.num_tokens))
    return refused


async def _used(
    conn: AsyncConnection,
    table: type[RollupHour | RollupMinute],
    buckets: Sequence[int],
    tenant_id: str,
    model: str | None,
) -> Iterable[Use]:
    tokens: ColumnElement[int] = sum(
        (getattr(table, name) for name in TOKEN_CLASSES[1:]), getattr(table, TOKEN_CLASSES[0])
    )
    query = select(table.bucket, func.sum(table.num_requests), func.sum(tokens)).where(
        among(conn, table.bucket, buckets), table.tenant_id == tenant_id, table.tier == "interactive"
    )
    if model is not None:
        query = query.where(_is_bound(table, model))
    rows = await conn.execute(query.group_by(table.bucket))
    return [Use(row[0], int(row[1]), int(row[2])) for row in rows]


def _is_bound(table: type[RollupHour | RollupMinute], model: str) -> ColumnElement[bool]:
    """Returns the condition that the limits of `model` bound a request: it was of the model, of an adapter of it, or of
    its overflow. It says in SQL what `base_of` says."""
    prefix = f"{model}:"
    is_longer = func.substr(table.model, 1, len(prefix)) == prefix
    return or_(table.model == model, and_(is_longer, func.substr(table.model, len(prefix) + 1).not_like("%:%")))
