"""Use by label: the daily sums of charged requests by end user and by metadata, for a tenant that charges its own users.

The ledger knows no labels, so the sums are made separately, when rows come into the request log, and are as complete as
that log is. A request whose charge is taken back, because its client's SDK repeated it, leaves them. A client may
invent a value for each request. So a tenant has a bounded number of sums a day, and what comes beyond it is added to
the sum without a value: the sums of a label are always those of all its requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Row, case, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import add_up, among
from accounting.requests.request_log import LoggedRequest
from accounting.tables.idempotency_models import UnheardAttempt
from accounting.tables.models import LedgerEntry
from accounting.tables.request_models import END_USER, LabelUsage, RequestLog

DAY_MS = 86_400_000
METADATA = "metadata."
"""The label of a metadata field is this and the field's key."""
MAX_SUMS = 2_000
"""The most sums with a value of one tenant's day."""
MAX_CHARACTERS = 200
"""Longer keys and values are cut."""
_KEY = tuple(column.name for column in LabelUsage.__table__.primary_key)
_SUMS = ("num_requests", "prompt_tokens", "cached_tokens", "output_tokens", "charge")

_Key = tuple[str, str, int, str, str, str]
"""Tenant, label, day, value, model, currency: the primary key in its order."""


class LabelFilter(msgspec.Struct, frozen=True, kw_only=True):
    """The sums to list, over whole days of UTC: from the day of `since_ms` to that before `until_ms`."""

    label: str = END_USER
    tenant_id: str | None = None
    """The only tenant; None takes all."""
    model: str | None = None
    since_ms: int
    until_ms: int


class LabelSum(msgspec.Struct, frozen=True, kw_only=True):
    """The charged requests of one value of a label."""

    value: str
    """An empty text stands for the requests that have a value beyond the bound."""
    tenant_id: str
    currency: str
    num_requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    charge: int
    """Micro-units of `currency`."""


class LabelDay(msgspec.Struct, frozen=True, kw_only=True):
    """The charged requests of one value of a label on one day of UTC."""

    day_ms: int
    value: str | None
    """The value. None stands for all that were not asked for by name."""
    currency: str
    num_requests: int
    charge: int
    """Micro-units of `currency`."""


async def note(conn: AsyncConnection, requests: Iterable[LoggedRequest]) -> None:
    """Adds requests to the sums, in the transaction that adds their rows to the log and before it does: a request that
    has a row already is in the sums."""
    labelled = {one.request_id: one for one in requests if one.currency and _labels(one)}
    if not labelled:
        return
    known = await conn.scalars(select(RequestLog.request_id).where(among(conn, RequestLog.request_id, labelled)))
    for request_id in [*known, *await _taken_back(conn, labelled)]:
        labelled.pop(request_id, None)
    await _add_up(conn, labelled.values(), 1)


async def take_back(conn: AsyncConnection, request_ids: Collection[str]) -> None:
    """Takes requests out of the sums, in the transaction that takes their charges back and marks their attempts as
    moved. A request whose row comes into the log later does not come into the sums."""
    rows = await conn.execute(select(RequestLog.__table__).where(among(conn, RequestLog.request_id, request_ids)))
    await _add_up(conn, [LoggedRequest(**row._mapping) for row in rows], -1)


async def _taken_back(conn: AsyncConnection, request_ids: Collection[str]) -> Iterable[str]:
    """Returns those of the requests whose charges were taken back. Until the transaction ends no other one's is, as its
    attempt is locked: `take_back` then finds the row that this transaction adds."""
    attempt, entry = UnheardAttempt.request_id, LedgerEntry.request_id
    locked = select(attempt).where(among(conn, attempt, request_ids)).order_by(attempt).with_for_update(read=True)
    if not (attempts := (await conn.scalars(locked)).all()):
        return ()
    reversals = select(entry).where(among(conn, entry, attempts), LedgerEntry.kind == "reversal")
    return (await conn.scalars(reversals)).all()


async def _add_up(conn: AsyncConnection, requests: Iterable[LoggedRequest], sign: int) -> None:
    sums: dict[_Key, list[int]] = defaultdict(lambda: [0] * len(_SUMS))
    for one in requests:
        amounts = [sign * amount for amount in (1, *(getattr(one, name) for name in _SUMS[1:]))]
        day_ms = one.started_at_ms // DAY_MS * DAY_MS
        for label, value in _labels(one):
            _add(sums[one.tenant_id, label, day_ms, value, one.model, one.currency], amounts)
    for tenant_id, day_ms in {(key[0], key[2]) for key in sums}:
        await _keep_bound(conn, sums, tenant_id, day_ms)
    rows = [dict(zip((*_KEY, *_SUMS), (*key, *amounts), strict=True)) for key, amounts in sorted(sums.items())]
    await add_up(conn, LabelUsage.__table__, rows, _SUMS)


async def _keep_bound(conn: AsyncConnection, sums: dict[_Key, list[int]], tenant_id: str, day_ms: int) -> None:
    """Takes the values out of new sums for which the tenant's day has no room."""
    own = [key for key in sums if (key[0], key[2]) == (tenant_id, day_ms)]
    usage = LabelUsage
    of_day = usage.tenant_id == tenant_id, usage.day_ms == day_ms, usage.label.in_({key[1] for key in own})
    num_stored = await conn.scalar(select(func.count()).where(*of_day[:2], usage.value != "")) or 0
    if num_stored + len(own) <= MAX_SUMS:
        return
    columns = usage.tenant_id, usage.label, usage.day_ms, usage.value, usage.model, usage.currency
    stored = {tuple(row) for row in await conn.execute(select(*columns).where(*of_day))}
    new = [key for key in own if key not in stored]
    for tenant, label, day, value, model, currency in new[max(0, MAX_SUMS - num_stored) :]:
        _add(sums[tenant, label, day, "", model, currency], sums.pop((tenant, label, day, value, model, currency)))


def _labels(one: LoggedRequest) -> list[tuple[str, str]]:
    pairs = [(END_USER, one.end_user), *((METADATA + key, value) for key, value in (one.metadata or {}).items())]
    return [
        (label[:MAX_CHARACTERS], value[:MAX_CHARACTERS]) for label, value in pairs if isinstance(value, str) and value
    ]


def _add(sums: list[int], amounts: Iterable[int]) -> None:
    for place, amount in enumerate(amounts):
        sums[place] += amount


async def list_labels(conn: AsyncConnection, wanted: LabelFilter) -> list[str]:
    """Returns the labels that have a sum in these days, in their order."""
    query = select(LabelUsage.label).where(*_within(wanted))
    return list(await conn.scalars(query.distinct().order_by(LabelUsage.label)))


async def list_sums(conn: AsyncConnection, wanted: LabelFilter, limit: int) -> Sequence[LabelSum]:
    """Returns the largest sums of a label."""
    usage = LabelUsage
    groups = usage.value, usage.tenant_id, usage.currency
    totals: list[Any] = [func.sum(getattr(usage, name)).label(name) for name in _SUMS]
    query = select(*groups, *totals).where(usage.label == wanted.label, *_within(wanted))
    query = query.group_by(*groups).order_by(totals[-1].desc(), *groups).limit(limit)
    return [_sum(row) for row in await conn.execute(query)]


async def list_days(conn: AsyncConnection, wanted: LabelFilter, values: Sequence[str]) -> Sequence[LabelDay]:
    """Returns the sums of each day: of the named values one by one, and of all others together, whose value is None."""
    usage = LabelUsage
    value = case((usage.value.in_(values), usage.value), else_=None).label("value")
    totals = func.sum(usage.num_requests), func.sum(usage.charge)
    query = select(usage.day_ms, value, usage.currency, *totals).where(usage.label == wanted.label, *_within(wanted))
    query = query.group_by(usage.day_ms, value, usage.currency).order_by(usage.day_ms)
    return [
        LabelDay(day_ms=day_ms, value=one, currency=currency, num_requests=int(number), charge=int(charge))
        for day_ms, one, currency, number, charge in await conn.execute(query)
    ]


async def forget(conn: AsyncConnection, before_ms: int) -> int:
    """Deletes the sums of days that ended before this time. Returns how many they were."""
    return (await conn.execute(delete(LabelUsage).where(LabelUsage.day_ms <= before_ms - DAY_MS))).rowcount


def _within(wanted: LabelFilter) -> list[ColumnElement[bool]]:
    first = wanted.since_ms // DAY_MS * DAY_MS
    where = [LabelUsage.day_ms >= first, LabelUsage.day_ms < wanted.until_ms]
    where += [] if wanted.tenant_id is None else [LabelUsage.tenant_id == wanted.tenant_id]
    return where + ([] if wanted.model is None else [LabelUsage.model == wanted.model])


def _sum(row: Row[Any]) -> LabelSum:
    # PostgreSQL adds integers up to decimals.
    values: dict[str, Any] = {name: int(value) if name in _SUMS else value for name, value in row._mapping.items()}
    return LabelSum(**values)
