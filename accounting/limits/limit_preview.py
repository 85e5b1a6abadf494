"""A preview of a limit: which of a tenant's requests of the last days it would have refused.

It counts from the rollups, and so approximately: limits of a minute by minutes of the clock, a limit of a day and a budget
by hours. The limiter's windows slide, and it reserves before it knows the price; requests that were refused then are not
among them; the requests of a bucket count as equally large; and nobody comes back who was refused. Batches are left out
where no such limit binds them: they count for budgets alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import among
from accounting.ledger.rollups import SECONDS
from accounting.tables.models import RollupHour, RollupMinute
from accounting.values.budget_types import Budget
from accounting.values.periods import DAY_S

NUM_HOURS = 7 * 24
HOUR_S, MINUTE_S = SECONDS["1h"], SECONDS["1m"]


class Trial(msgspec.Struct, frozen=True):
    """The limits that are tried: those of a minute together, or one of a day, or a budget. Those without a `model` or a
    `key_id` are the tenant's own.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    input_tokens_per_minute: int | None = None
    output_tokens_per_minute: int | None = None
    requests_per_day: int | None = None
    budget: Budget | None = None
    model: str | None = None
    key_id: str | None = None

    @property
    def is_of_minutes(self) -> bool:
        return self.requests_per_day is None and self.budget is None

    def counts_from(self, second: int) -> int:
        """Returns the first second whose use counts against the limit in the hour that begins at `second`."""
        if self.budget is not None:
            return _period_of(self.budget, second)
        return second - DAY_S + HOUR_S


class Use(msgspec.Struct, frozen=True):
    """The use of a tenant in one minute or hour. Tokens are those that count against a limit: cached ones do not."""

    bucket: int
    """The first Unix second."""
    num_requests: int
    input_tokens: int = 0
    output_tokens: int = 0
    charge: int = 0
    """Micro-units of the tenant's currency."""


class Preview(msgspec.Struct, frozen=True):
    start: int
    end: int
    """The Unix seconds [start, end) that were looked at."""
    num_requests: int
    num_refused: int
    num_minutes: int | None
    """The minutes in which something would have been refused. None for a limit that is counted by hours."""
    num_hours: int
    """The hours in which something would have been refused."""


async def preview(conn: AsyncConnection, tenant_id: str, trial: Trial, now: int) -> Preview:
    """Looks at the last 7 days, the current hour included. Only requests count that the limits bind."""
    end = now - now % HOUR_S + HOUR_S
    start = end - NUM_HOURS * HOUR_S
    if not trial.is_of_minutes:
        hours = await _used(conn, RollupHour, range(trial.counts_from(start), end, HOUR_S), tenant_id, trial)
        told = [(use, refused) for use, refused in refused_by_hour(hours, trial) if use.bucket >= start]
        num_refused_of = [refused for _, refused in told]
        num_requests = sum(use.num_requests for use, _ in told)
        return Preview(start, end, num_requests, sum(num_refused_of), None, sum(map(bool, num_refused_of)))
    by_hour = await _used(conn, RollupHour, range(start, end, HOUR_S), tenant_id, trial)
    # A minute uses at most what its hour used, so few hours are looked into.
    crowded = [hour.bucket for hour in by_hour if num_refused(hour, trial)]
    minutes = [second for hour in crowded for second in range(hour, hour + HOUR_S, MINUTE_S)]
    by_minute = await _used(conn, RollupMinute, minutes, tenant_id, trial)
    refused = {use.bucket: number for use in by_minute if (number := num_refused(use, trial))}
    num_requests = sum(hour.num_requests for hour in by_hour)
    num_hours = len({bucket // HOUR_S for bucket in refused})
    return Preview(start, end, num_requests, sum(refused.values()), len(refused), num_hours)


def num_refused(used: Use, trial: Trial) -> int:
    """Returns how many requests of a minute the limits of a minute would have refused."""
    refused = 0
    if trial.requests_per_minute is not None:
        refused = max(0, used.num_requests - trial.requests_per_minute)
    for amount, limit in (
        (used.input_tokens + used.output_tokens, trial.tokens_per_minute),
        (used.input_tokens, trial.input_tokens_per_minute),
        (used.output_tokens, trial.output_tokens_per_minute),
    ):
        if limit is not None and amount > limit:
            refused = max(refused, _share_of(used, amount - limit, amount))
    return refused


def refused_by_hour(hours: Iterable[Use], trial: Trial) -> Iterator[tuple[Use, int]]:
    """Yields how many requests of each hour, in order, the limit of a day or the budget would have refused. What it would
    have refused counts against nothing."""
    taken: dict[int, int] = defaultdict(int)
    for use in hours:
        if trial.budget is not None:
            period = _period_of(trial.budget, use.bucket)
            excess = max(0, use.charge - max(0, trial.budget.limit_micro_units - taken[period]))
            taken[period] += use.charge - excess
            yield use, _share_of(use, excess, use.charge)
        elif trial.requests_per_day is not None:
            day = sum(number for bucket, number in taken.items() if bucket > use.bucket - DAY_S)
            taken[use.bucket] = min(use.num_requests, max(0, trial.requests_per_day - day))
            yield use, use.num_requests - taken[use.bucket]


def _share_of(used: Use, excess: int, amount: int) -> int:
    """Returns the number of requests, rounded up, that used `excess` of an amount."""
    return -(-used.num_requests * excess // amount) if excess else 0


def _period_of(budget: Budget, second: int) -> int:
    """Returns the first second of the period of a budget that is no fixed one."""
    period = budget.period_at(second * 1000)
    assert period is not None
    return period.start_ms // 1000


async def _used(
    conn: AsyncConnection, table: type[RollupHour | RollupMinute], buckets: Sequence[int], tenant_id: str, trial: Trial
) -> list[Use]:
    """Returns the use of the buckets that have one, in order."""
    sums = (table.num_requests, table.cache_write + table.uncached, table.output, table.charge)
    query = select(table.bucket, *map(func.sum, sums)).where(
        among(conn, table.bucket, buckets), table.tenant_id == tenant_id
    )
    tier = "interactive" if trial.budget is None else trial.budget.tier
    if tier is not None:
        query = query.where(table.tier == tier)
    if trial.key_id is not None:
        query = query.where(table.key_id == trial.key_id)
    if trial.model is not None:
        query = query.where(_is_bound(table, trial.model))
    rows = await conn.execute(query.group_by(table.bucket).order_by(table.bucket))
    return [Use(row[0], *map(int, row[1:])) for row in rows]


def _is_bound(table: type[RollupHour | RollupMinute], model: str) -> ColumnElement[bool]:
    """Returns the condition that the limits of `model` bound a request: it was of the model, of an adapter of it, or of
    its overflow. It says in SQL what `base_of` says."""
    prefix = f"{model}:"
    is_longer = func.substr(table.model, 1, len(prefix)) == prefix
    return or_(table.model == model, and_(is_longer, func.substr(table.model, len(prefix) + 1).not_like("%:%")))
