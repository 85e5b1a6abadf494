"""The reading of providers' cost APIs: who reads now, what was read, and what has changed since. The module knows no HTTP.

An amount is never edited: a later statement of the provider is a further revision, and a line that it takes back gets a
revision of 0. So a report may be read again and again, and each correction stays visible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import and_, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection
from sqlalchemy.orm import aliased

from accounting.batches.claims import now_ms
from accounting.database import audit
from accounting.database.db import insert_absent, insert_all
from accounting.tables.upstream_models import UpstreamCall, UpstreamCostDay, UpstreamCostPull
from accounting.values.periods import DAY_S

CLAIM_MS = 300_000
"""The time for which a pull is its process's alone. If the process dies, others may begin after it."""
WINDOW_S = 31 * DAY_S
"""Days that are read again at each pull, because providers correct them."""


TOO_MANY_LINES = "too_many_lines"
"""The word for the failure of a pull that passed over a full day."""
MAX_DAY_ROWS = 20_000
"""The most rows of one day, corrections included. A provider that invents lines, or changes each of them every hour, fills
neither the disk nor the memory."""


class DayCost(msgspec.Struct, frozen=True):
    """The bill of a provider for one line item of one day."""

    day: int
    """The first second of a day of UTC."""
    line_item: str
    currency: str
    amount: int
    """Micro-units; negative for a credit."""


class Pull(msgspec.Struct, frozen=True):
    """The state of reading an upstream's cost API. Times are 0 if there was none."""

    upstream: str
    tried_at_ms: int = 0
    pulled_at_ms: int = 0
    first_day: int = 0
    fault: str = ""


class Written(msgspec.Struct, frozen=True):
    """The result of a pull."""

    num_changed: int
    """Lines that are new or differ."""
    full_days: tuple[int, ...] = ()
    """Days of which the provider has stated more than is kept. Nothing of this pull is written about them."""


class Claim(msgspec.Struct, frozen=True):
    """The right to pull, until it ends. Days from `since` up to and without `until` are to be read."""

    upstream: str
    ends_at_ms: int
    began_at_ms: int
    since: int
    until: int


async def states(conn: AsyncConnection, upstreams: Collection[str]) -> Mapping[str, Pull]:
    """Returns the state of each of these upstreams; a fresh one for an upstream that was never pulled."""
    pull = UpstreamCostPull
    columns = [getattr(pull, name) for name in Pull.__struct_fields__]
    rows = await conn.execute(select(*columns).where(pull.upstream.in_(sorted(upstreams))))
    found = {row.upstream: Pull(*row) for row in rows}
    return {name: found.get(name, Pull(name)) for name in upstreams}


async def claim(conn: AsyncConnection, upstream: str, *, period_ms: int = 0) -> Claim | None:
    """Claims the pull of an upstream. Returns None if another process has it, or if the last one ended less than
    `period_ms` ago.
    """
    now = await now_ms(conn)
    fresh = dict.fromkeys(("claimed_until_ms", "tried_at_ms", "pulled_at_ms", "first_day"), 0)
    await insert_absent(conn, UpstreamCostPull.__table__, [{"upstream": upstream, **fresh, "fault": ""}])
    pull = UpstreamCostPull
    is_free = pull.upstream == upstream, pull.claimed_until_ms <= now, pull.tried_at_ms <= now - period_ms
    taken = await conn.execute(update(pull).where(*is_free).values(claimed_until_ms=now + CLAIM_MS))
    if taken.rowcount != 1:
        return None
    [known] = (await states(conn, [upstream])).values()
    first_call_ms = await conn.scalar(select(func.min(UpstreamCall.started_at_ms)).where(_is_of(upstream)))
    today = _day(now)
    since = first_day_to_read(known, today, None if first_call_ms is None else _day(first_call_ms))
    return Claim(upstream, now + CLAIM_MS, now, since, today)


def first_day_to_read(known: Pull, today: int, first_call: int | None) -> int:
    """Decides the first day of a pull: the window reaches back from the last one that succeeded, so that no day is left
    out however long pulls have failed. Days before our first call are not read, but for yesterday: a pull always
    asks."""
    if known.pulled_at_ms:
        return max(known.first_day, _day(known.pulled_at_ms) - WINDOW_S)
    yesterday = today - DAY_S
    return max(today - WINDOW_S, yesterday if first_call is None else min(first_call, yesterday))


async def succeeded(conn: AsyncConnection, done: Claim, costs: Sequence[DayCost], *, actor: str = "") -> Written | None:
    """Writes what was read; `costs` are all lines of the claimed days, each once. Returns None if the claim had ended:
    another process has read since then. `actor` is who asked for the pull, if somebody did. A day that is full is passed
    over, so that the pulls after this one leave it behind some day.
    """
    pull, now = UpstreamCostPull, await now_ms(conn)
    earliest = func.coalesce(func.nullif(pull.first_day, 0), done.since)
    ended = {"claimed_until_ms": 0, "tried_at_ms": now, "pulled_at_ms": done.began_at_ms, "fault": ""}
    if not await _end(conn, done, first_day=earliest, **ended):
        return None
    of_days: defaultdict[int, list[DayCost]] = defaultdict(list)
    for cost in costs:
        of_days[cost.day].append(cost)
    # Day by day, so that the loop never stands still for all that a provider may state.
    num_changed, full_days = 0, []
    for day in range(done.since, done.until, DAY_S):
        num_rows = await _add(conn, done.upstream, day, of_days[day], now)
        if num_rows is None:
            full_days.append(day)
        else:
            num_changed += num_rows
    if full_days:
        of_upstream = update(pull).where(pull.upstream == done.upstream)
        await conn.execute(of_upstream.values(fault=TOO_MANY_LINES))
    if actor:
        detail = {"num_lines": len(costs), "num_changed": num_changed}
        event = "headgate.upstream.costs_pulled"
        await audit.record(conn, event, actor=actor, now=now // 1000, object_id=done.upstream, detail=detail)
    return Written(num_changed, tuple(full_days))


async def failed(conn: AsyncConnection, done: Claim, fault: str, *, actor: str = "") -> None:
    """Writes the reason, a fixed word, for which the pull failed. What was read before stays."""
    now = await now_ms(conn)
    if not await _end(conn, done, claimed_until_ms=0, tried_at_ms=now, fault=fault):
        return
    if actor:
        event, detail = "headgate.upstream.costs_pulled", {"fault": fault}
        await audit.record(conn, event, actor=actor, now=now // 1000, object_id=done.upstream, detail=detail)


Key = tuple[str, str]
"""Line item and currency."""


async def _add(conn: AsyncConnection, upstream: str, day: int, costs: Sequence[DayCost], now: int) -> int | None:
    """Writes what is new about a day, and returns the number of its rows; None if the day would have too many."""
    row = UpstreamCostDay
    of_day = row.upstream == upstream, row.day == day
    in_force = select(row.line_item, row.currency, row.revision, row.amount).where(*of_day, is_in_force())
    known = {(one.line_item, one.currency): (one.revision, one.amount) for one in await conn.execute(in_force)}
    revised = _revised(known, {(cost.line_item, cost.currency): cost.amount for cost in costs})
    if not revised:
        return 0
    num_rows = await conn.scalar(select(func.count()).select_from(row).where(*of_day)) or 0
    if num_rows + len(revised) > MAX_DAY_ROWS:
        return None
    place = {"upstream": upstream, "day": day, "pulled_at_ms": now}
    names = ("line_item", "currency", "revision", "amount")
    rows = [place | dict(zip(names, one, strict=True)) for one in revised]
    await insert_all(conn, UpstreamCostDay.__table__, rows)
    return len(rows)


def _revised(known: Mapping[Key, tuple[int, int]], stated: Mapping[Key, int]) -> list[tuple[str, str, int, int]]:
    """Returns the rows to add: line item, currency, revision and amount. `known` has the revision and the amount in
    force."""
    found = []
    for key, amount in sorted({**dict.fromkeys(known, 0), **stated}.items()):
        revision, before = known.get(key, (0, 0))
        if amount != before:
            found.append((*key, revision + 1, amount))
    return found


def is_in_force() -> Any:
    """Returns the condition that a row is the last revision of its line."""
    row, later = UpstreamCostDay, aliased(UpstreamCostDay)
    names = ("upstream", "day", "line_item", "currency")
    same = and_(*(getattr(later, name) == getattr(row, name) for name in names), later.revision > row.revision)
    return ~select(later.revision).where(same).exists()


async def _end(conn: AsyncConnection, done: Claim, **values: Any) -> bool:
    mine = UpstreamCostPull.upstream == done.upstream, UpstreamCostPull.claimed_until_ms == done.ends_at_ms
    return (await conn.execute(update(UpstreamCostPull).where(*mine).values(**values))).rowcount == 1


def _is_of(upstream: str) -> Any:
    return UpstreamCall.upstream == upstream


def _day(ms: int) -> int:
    return ms // 1000 // DAY_S * DAY_S
