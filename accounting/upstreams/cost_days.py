"""The bill of a provider by days, compared with what the calls of the same days should cost. The comparison is pure.

It is made anew whenever it is read, so a late call or a correction needs no further step. Every micro-unit of both sides
is matched, or it is drift and stands in a named account.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import BigInteger, case, func, literal_column, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.prices.prices import DEFAULT_CURRENCY, DEFAULT_SHEET
from accounting.tables.models import PriceSheet
from accounting.tables.upstream_models import UpstreamCall, UpstreamCostDay, UpstreamCostPull
from accounting.upstreams.cost_pulls import is_in_force
from accounting.values.periods import DAY_S

LATE_S = 3 * DAY_S
"""The time after the end of a day for which rows of it may still come."""

DayAccount = Literal["", "rounding", "open", "late", "unknown", "unbilled", "over", "under"]
NAMES: tuple[str, ...] = get_args(DayAccount)
"""The account in which the drift of a day stands; empty if there is none.

rounding: at most a micro-unit for each call and each line. open: the day was not over when the bill was read. late: it was
over for less than three days. unknown: a bill without a call of ours. unbilled: calls without a bill. over, under: the bill
is more or less than expected. Credits and lines of other currencies are kept apart from all of these.
"""


class DayFacts(msgspec.Struct, frozen=True):
    """The knowledge of an upstream's day. Amounts are micro-units."""

    day: int
    """The first second of a day of UTC."""
    billed: int = 0
    """The sum of the lines above 0 in our currency."""
    credit: int = 0
    """The sum of the lines below 0 in our currency; it is not above 0."""
    num_lines: int = 0
    num_corrections: int = 0
    """Amounts that the provider has stated anew."""
    others: Mapping[str, int] = {}
    """The sums of lines in other currencies. No rate of exchange is known here, so nothing is compared."""
    expected: int = 0
    num_calls: int = 0
    num_unsure: int = 0
    """Calls that were cut or have failed, or whose statement was not believed: the provider may count them otherwise."""


class Judgement(msgspec.Struct, frozen=True):
    matched: int
    account: DayAccount


def judge(facts: DayFacts, read_at: int) -> Judgement:
    """Judges a day by a bill that was read at that time. Billed minus expected is the drift, and `account` names it."""
    drift, matched = facts.billed - facts.expected, min(facts.billed, facts.expected)
    if drift == 0:
        return Judgement(matched, "")
    if read_at < facts.day + DAY_S:
        return Judgement(matched, "open")
    if read_at < facts.day + DAY_S + LATE_S:
        return Judgement(matched, "late")
    if facts.num_calls == 0:
        return Judgement(matched, "unknown")
    if facts.billed == 0:
        return Judgement(matched, "unbilled")
    if abs(drift) <= facts.num_calls + facts.num_lines:
        return Judgement(matched, "rounding")
    return Judgement(matched, "over" if drift > 0 else "under")


class ComparedDay(msgspec.Struct, frozen=True):
    facts: DayFacts
    matched: int
    account: DayAccount

    @property
    def drift(self) -> int:
        return self.facts.billed - self.facts.expected


class DaySums(msgspec.Struct, frozen=True):
    """Several days together."""

    billed: int
    credit: int
    others: Mapping[str, int]
    expected: int
    matched: int
    drift: Mapping[str, int]
    """The bill beyond the expected by account; a negative number is less than was expected."""


def sums(days: Iterable[ComparedDay]) -> DaySums:
    drift: defaultdict[str, int] = defaultdict(int)
    others: defaultdict[str, int] = defaultdict(int)
    billed = credit = expected = matched = 0
    for one in days:
        billed, credit = billed + one.facts.billed, credit + one.facts.credit
        expected, matched = expected + one.facts.expected, matched + one.matched
        if one.account:
            drift[one.account] += one.drift
        for currency, amount in one.facts.others.items():
            others[currency] += amount
    return DaySums(billed, credit, dict(others), expected, matched, dict(drift))


async def currency(conn: AsyncConnection) -> str:
    """Returns the currency in which upstreams' rates are declared: that of the default price sheet."""
    found = await conn.scalar(select(PriceSheet.currency).where(PriceSheet.id == DEFAULT_SHEET))
    return DEFAULT_CURRENCY if found is None else found


async def compare(
    conn: AsyncConnection, upstreams: Collection[str] | None = None, since: int = 0
) -> dict[str, list[ComparedDay]]:
    """Compares all days from `since` on, of these upstreams or of all whose cost API was ever read, in order of
    time."""
    pull = UpstreamCostPull
    query = select(pull.upstream, pull.pulled_at_ms, pull.first_day).where(pull.pulled_at_ms > 0)
    if upstreams is not None:
        query = query.where(pull.upstream.in_(sorted(upstreams)))
    pulls = {row.upstream: row for row in await conn.execute(query)}
    if not pulls:
        return {}
    facts = await _facts(conn, pulls.keys(), since)
    return {
        upstream: [
            _compared(one, row.pulled_at_ms // 1000)
            for one in sorted(facts[upstream].values(), key=lambda one: one.day)
            if one.day >= row.first_day
        ]
        for upstream, row in pulls.items()
    }


def _compared(facts: DayFacts, read_at: int) -> ComparedDay:
    found = judge(facts, read_at)
    return ComparedDay(facts, found.matched, found.account)


async def _facts(conn: AsyncConnection, upstreams: Collection[str], since: int) -> dict[str, dict[int, DayFacts]]:
    found: dict[str, dict[int, DayFacts]] = {name: {} for name in upstreams}
    ours = await currency(conn)
    for row in await conn.execute(_bills().where(UpstreamCostDay.upstream.in_(sorted(upstreams)), _from(since))):
        days = found[row.upstream]
        before = days.get(row.day, DayFacts(row.day))
        more: dict[str, Any] = {"num_corrections": before.num_corrections + int(row.num_corrections)}
        if row.currency == ours:
            more |= {"billed": int(row.billed), "credit": int(row.credit), "num_lines": row.num_lines}
        else:
            more["others"] = {**before.others, row.currency: int(row.billed) + int(row.credit)}
        days[row.day] = msgspec.structs.replace(before, **more)
    for row in await conn.execute(_calls(upstreams, since)):
        days = found[row.upstream]
        day = row.day_ms // 1000
        counts = {"num_calls": row.num_calls, "num_unsure": int(row.num_unsure)}
        days[day] = msgspec.structs.replace(days.get(day, DayFacts(day)), expected=int(row.expected), **counts)
    return found


def _bills() -> Any:
    row = UpstreamCostDay
    keys = (row.upstream, row.day, row.currency)
    return (
        select(
            *keys,
            func.sum(case((row.amount > 0, row.amount), else_=0)).label("billed"),
            func.sum(case((row.amount < 0, row.amount), else_=0)).label("credit"),
            func.count().label("num_lines"),
            func.sum(row.revision - 1).label("num_corrections"),
        )
        .where(is_in_force())
        .group_by(*keys)
        .order_by(*keys)
    )


def _from(since: int) -> Any:
    return UpstreamCostDay.day >= since


def _calls(upstreams: Collection[str], since: int) -> Any:
    call = UpstreamCall
    day_ms = (call.started_at_ms - call.started_at_ms % literal_column(str(DAY_S * 1000), BigInteger)).label("day_ms")
    is_unsure = or_(call.state != "delivered", call.drift != "")
    counted = select(
        call.upstream,
        day_ms,
        func.sum(call.expected_cost).label("expected"),
        func.count().label("num_calls"),
        func.sum(case((is_unsure, 1), else_=0)).label("num_unsure"),
    )
    wanted = call.upstream.in_(sorted(upstreams)), call.started_at_ms >= since * 1000
    return counted.where(*wanted).group_by(call.upstream, day_ms)


class BilledLine(msgspec.Struct, frozen=True):
    """One statement of a provider about a line of a day."""

    line_item: str
    currency: str
    revision: int
    amount: int
    pulled_at_ms: int


async def lines(conn: AsyncConnection, upstream: str, day: int) -> Sequence[BilledLine]:
    """Returns every statement about a day, earlier ones before later ones."""
    row = UpstreamCostDay
    columns = [getattr(row, name) for name in BilledLine.__struct_fields__]
    query = select(*columns).where(row.upstream == upstream, row.day == day)
    rows = await conn.execute(query.order_by(row.currency, row.line_item, row.revision))
    return [BilledLine(*one) for one in rows]
