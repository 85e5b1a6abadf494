"""Keys whose last hours are unusual, from the rollups by hour and day alone.

Only keys that used something worth a look are read in full, so the effort depends on how many of them there are and
not on the length of the ledger. Addresses and end users are in no rollup, so nothing is said of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import Row, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.anomalies.findings import (
    DAY_S,
    HOUR_S,
    MIN_CHARGE,
    MIN_REQUESTS,
    NUM_DAYS,
    Finding,
    KeyUse,
    Sums,
    judge,
)
from accounting.database.db import among
from accounting.tables.models import ApiKey, RollupDay, RollupHour, Tenant

MAX_HOURS = 24
MAX_KEYS = 200
"""The most keys that are judged: those with the highest charges of an hour."""
_RANK = {"leaked_key": 0, "spend_spike": 1, "more_requests": 2}


class Anomaly(msgspec.Struct, frozen=True):
    tenant_id: str
    tenant_name: str
    tenant_status: str
    key_id: str
    key_name: str | None
    key_works: bool
    """The key is neither disabled nor revoked."""
    currency: str
    new_models: tuple[str, ...]
    finding: Finding


async def find(conn: AsyncConnection, now: int, num_hours: int, tenant_id: str | None = None) -> list[Anomaly]:
    """Judges the current hour, as far as it has gone, and those before it, `num_hours` together: the worst first. With
    `tenant_id` only that tenant's keys are judged."""
    last = now - now % HOUR_S
    hours = [last - HOUR_S * back for back in reversed(range(num_hours))]
    worth = await _worth_a_look(conn, hours, tenant_id)
    keys = await _described(conn, worth)
    tenant_ids = {row.tenant_id for row in keys}
    judged = sorted({hour for one in worth.values() for hour in one.hours})
    by_hour = await _used(conn, judged, tenant_ids, worth)
    models = await _models_of(conn, RollupHour, judged, tenant_ids)
    known = await _models_before(conn, last, tenant_ids)
    found = []
    for row in keys:
        new_models = tuple(sorted(models[row.id] - known[row.id])) if known[row.id] else ()
        finding = judge(KeyUse(row.created_at, by_hour[row.id], new_models), sorted(worth[row.id].hours))
        if finding is not None:
            found.append(
                Anomaly(
                    tenant_id=row.tenant_id,
                    tenant_name=row.tenant_name,
                    tenant_status=row.tenant_status,
                    key_id=row.id,
                    key_name=row.name,
                    key_works=not row.disabled and row.revoked_at is None,
                    currency=worth[row.id].currency,
                    new_models=new_models,
                    finding=finding,
                )
            )
    return sorted(found, key=lambda one: (_RANK[one.finding.suspicion], -one.finding.observed.charge))


class _Worth(msgspec.Struct, frozen=True):
    """A key with the hours in which it used more than is never much."""

    currency: str
    hours: set[int]


async def _worth_a_look(conn: AsyncConnection, hours: Sequence[int], tenant_id: str | None) -> Mapping[str, _Worth]:
    requests, charge = func.sum(RollupHour.num_requests), func.sum(RollupHour.charge)
    currency = func.max(RollupHour.currency).label("currency")
    query = select(RollupHour.key_id, RollupHour.bucket, charge.label("charge"), currency)
    query = query.where(among(conn, RollupHour.bucket, hours))
    if tenant_id is not None:
        query = query.where(RollupHour.tenant_id == tenant_id)
    query = query.group_by(RollupHour.key_id, RollupHour.bucket)
    rows = await conn.execute(query.having(or_(requests > MIN_REQUESTS, charge > MIN_CHARGE)))
    worth: dict[str, _Worth] = {}
    for row in sorted(rows, key=lambda row: -row.charge):
        if row.key_id in worth or len(worth) < MAX_KEYS:
            worth.setdefault(row.key_id, _Worth(row.currency, set())).hours.add(row.bucket)
    return worth


async def _described(conn: AsyncConnection, key_ids: Collection[str]) -> list[Row[Any]]:
    query = (
        select(
            ApiKey.id,
            ApiKey.name,
            ApiKey.tenant_id,
            ApiKey.created_at,
            ApiKey.disabled,
            ApiKey.revoked_at,
            Tenant.name.label("tenant_name"),
            Tenant.status.label("tenant_status"),
        )
        .join(Tenant, Tenant.id == ApiKey.tenant_id)
        .where(among(conn, ApiKey.id, key_ids))
    )
    return list(await conn.execute(query))


async def _used(
    conn: AsyncConnection, hours: Sequence[int], tenant_ids: Collection[str], key_ids: Collection[str]
) -> Mapping[str, Mapping[int, Sums]]:
    """Returns what each key used by hour, in these hours and the same ones of the days before."""
    buckets = [hour - day * DAY_S for hour in hours for day in range(NUM_DAYS + 1)]
    table = RollupHour
    columns = (table.num_requests, table.cache_read, table.cache_write + table.uncached, table.output, table.charge)
    query = select(table.key_id, table.bucket, *(func.sum(column) for column in columns)).where(
        among(conn, table.bucket, buckets), among(conn, table.tenant_id, tenant_ids)
    )
    by_hour: dict[str, dict[int, Sums]] = defaultdict(dict)
    for key_id, bucket, *sums in await conn.execute(query.group_by(table.key_id, table.bucket)):
        if key_id in key_ids:
            by_hour[key_id][bucket] = Sums(*map(int, sums))
    return by_hour


async def _models_before(conn: AsyncConnection, hour: int, tenant_ids: Collection[str]) -> Mapping[str, set[str]]:
    """Returns the models that each key used on the whole days before that hour's day and the day before it, so that
    none of the judged hours is among them."""
    day = hour - hour % DAY_S
    days = [day - back * DAY_S for back in range(2, NUM_DAYS + 2)]
    return await _models_of(conn, RollupDay, days, tenant_ids)


async def _models_of(
    conn: AsyncConnection, table: type[RollupHour | RollupDay], buckets: Collection[int], tenant_ids: Collection[str]
) -> Mapping[str, set[str]]:
    query = select(table.key_id, table.model).distinct()
    query = query.where(among(conn, table.bucket, buckets), among(conn, table.tenant_id, tenant_ids))
    models: dict[str, set[str]] = defaultdict(set)
    for key_id, model in await conn.execute(query):
        models[key_id].add(model)
    return models
