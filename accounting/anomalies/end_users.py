"""End users whose day is unusual: the present day of each against its own days before, from the daily sums by label.

A sum has no hours, so a day is judged as far as it has gone: a spike is seen once it is above a whole usual day.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec
from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.anomalies.bands import Band, band
from accounting.anomalies.findings import DAY_S, MIN_CHARGE, MIN_REQUESTS, NUM_DAYS
from accounting.database.db import among
from accounting.tables.request_models import END_USER, LabelUsage

MAX_END_USERS = 200
"""The most end users that are judged: those with the highest charges of the day."""

DAY_MS = 1000 * DAY_S

_Who = tuple[str, str, str]
"""Tenant, end user, currency."""


class EndUserAnomaly(msgspec.Struct, frozen=True):
    tenant_id: str
    end_user: str
    currency: str
    day_ms: int
    num_requests: int
    charge: int
    """Micro-units of `currency`."""
    requests: Band
    charges: Band


async def find(conn: AsyncConnection, now_ms: int, tenant_id: str | None = None) -> list[EndUserAnomaly]:
    """Judges the present day in UTC, the highest charge first. With `tenant_id` only that tenant's end users are
    judged."""
    today = now_ms - now_ms % DAY_MS
    usage = LabelUsage
    who = usage.tenant_id, usage.value, usage.currency
    requests, charge = func.sum(usage.num_requests), func.sum(usage.charge)
    query = select(*who, requests, charge).where(usage.label == END_USER, usage.value != "", usage.day_ms == today)
    if tenant_id is not None:
        query = query.where(usage.tenant_id == tenant_id)
    query = query.group_by(*who).having(or_(requests > MIN_REQUESTS, charge > MIN_CHARGE))
    rows = await conn.execute(query.order_by(charge.desc(), *who).limit(MAX_END_USERS))
    used = {(tenant, value, currency): (int(number), int(amount)) for tenant, value, currency, number, amount in rows}
    past = await _before(conn, today, used)
    judged = [_judge(one, today, *used[one], past[one]) for one in used]
    return [one for one in judged if one is not None]


async def _before(
    conn: AsyncConnection, today: int, used: Mapping[_Who, object]
) -> Mapping[_Who, dict[int, tuple[int, int]]]:
    """Returns the requests and charges of each earlier day on which an end user was seen."""
    usage = LabelUsage
    who = usage.tenant_id, usage.value, usage.currency
    query = select(*who, usage.day_ms, func.sum(usage.num_requests), func.sum(usage.charge)).where(
        among(conn, usage.tenant_id, {tenant for tenant, _, _ in used}),
        usage.label == END_USER,
        usage.day_ms.between(today - NUM_DAYS * DAY_MS, today - DAY_MS),
        among(conn, usage.value, {value for _, value, _ in used}),
    )
    past: dict[_Who, dict[int, tuple[int, int]]] = defaultdict(dict)
    for tenant, value, currency, day_ms, number, amount in await conn.execute(query.group_by(*who, usage.day_ms)):
        past[tenant, value, currency][day_ms] = int(number), int(amount)
    return past


def _judge(
    who: _Who, today: int, num_requests: int, charge: int, past: Mapping[int, tuple[int, int]]
) -> EndUserAnomaly | None:
    """Judges by the days since the end user was first seen. None means that nothing is unusual, or that these are too
    few."""
    first = min(past, default=today)
    days = [past.get(day, (0, 0)) for day in range(first, today, DAY_MS)]
    requests, charges = band([one for one, _ in days], MIN_REQUESTS), band([one for _, one in days], MIN_CHARGE)
    if requests is None or charges is None or (num_requests <= requests.upper and charge <= charges.upper):
        return None
    tenant_id, end_user, currency = who
    return EndUserAnomaly(tenant_id, end_user, currency, today, num_requests, charge, requests, charges)
