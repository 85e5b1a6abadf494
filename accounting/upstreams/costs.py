"""The bills of providers: rows of their cost reports, matched with the calls that we know of. The rule of matching is pure.

Every micro-unit of a row is matched with what a call should cost, or it is drift and stands in a named account. A row
that comes before its call, or a call that comes before its row, is judged again when the other one comes, or within a minute.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args

import msgspec
from sqlalchemy import and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import audit
from accounting.database.db import insert_new
from accounting.tables.upstream_models import UpstreamCall, UpstreamCost

ROUNDING = 1
"""Micro-units by which a row may differ: providers round each class of tokens, and we the sum."""

AT_ONCE = 10_000
"""The most calls whose rows are judged again at a time."""

Account = Literal["", "rounding", "price", "usage", "cut", "failed", "unknown", "duplicate", "refund"]
NAMES: tuple[str, ...] = get_args(Account)
"""The account in which the drift of a row stands; empty if there is none.

rounding: a micro-unit. price: other rates than declared, for tokens that agree. usage: tokens that were stated falsely
or not at all. cut: we hung up and the provider went on. failed: an attempt that delivered nothing. unknown: no call of
ours. duplicate: a further row of a call. refund: money back.
"""


class CostRow(msgspec.Struct, frozen=True):
    """One row of a provider's cost report."""

    row_id: str
    provider_id: str
    amount: int
    """Micro-units."""
    billed_at_ms: int


class KnownCall(msgspec.Struct, frozen=True):
    state: str
    drift: str
    expected_cost: int


class Judgement(msgspec.Struct, frozen=True):
    matched: int
    account: Account


def judge(amount: int, call: KnownCall | None, *, is_first: bool) -> Judgement:
    """Judges a row. `is_first` says that no other row stands for the call already. What the amount has beyond the matched
    part, or lacks of it, is drift.
    """
    if amount < 0:
        return Judgement(0, "refund")
    if call is None:
        return Judgement(0, "unknown")
    if not is_first:
        return Judgement(0, "duplicate")
    if call.state == "failed":
        return Judgement(0, "failed") if amount else Judgement(0, "")
    matched = call.expected_cost
    if amount == matched:
        return Judgement(matched, "")
    if call.state == "cut":
        return Judgement(matched, "cut")
    if call.drift:
        return Judgement(matched, "usage")
    return Judgement(matched, "rounding" if abs(amount - matched) <= ROUNDING else "price")


class Imported(msgspec.Struct, frozen=True):
    num_new: int
    num_known: int


async def add(conn: AsyncConnection, upstream: str, rows: Sequence[CostRow], now_ms: int, actor: str) -> Imported:
    """Adds rows of a report. One that was added already changes nothing, so a report may be read again and again."""
    values = [
        {
            **msgspec.structs.asdict(row),
            "upstream": upstream,
            "matched": 0,
            "account": "unknown",
            "posted_at_ms": now_ms,
        }
        for row in {row.row_id: row for row in rows}.values()
    ]
    new = await insert_new(conn, UpstreamCost.__table__, values, (UpstreamCost.row_id,))
    await _judge(conn, upstream, {row.provider_id for row in rows})
    detail = {"num_rows": len(rows), "num_new": len(new)}
    now = now_ms // 1000
    await audit.record(conn, "headgate.upstream.billed", actor=actor, now=now, object_id=upstream, detail=detail)
    return Imported(len(new), len(rows) - len(new))


async def unjudged(conn: AsyncConnection) -> list[tuple[str, str]]:
    """Returns (upstream, provider_id) of calls that were not known when their rows came."""
    cost, call = UpstreamCost, UpstreamCall
    known = and_(call.upstream == cost.upstream, call.provider_id == cost.provider_id)
    query = select(cost.upstream, cost.provider_id).distinct().join(call, known)
    query = query.where(cost.account == "unknown", cost.provider_id != "").limit(AT_ONCE)
    return [(row.upstream, row.provider_id) for row in await conn.execute(query)]


async def judge_again(conn: AsyncConnection) -> None:
    """Judges the rows whose call was not known when they came."""
    waiting = await unjudged(conn)
    for upstream in {upstream for upstream, _ in waiting}:
        await _judge(conn, upstream, {provider_id for of, provider_id in waiting if of == upstream})


async def _judge(conn: AsyncConnection, upstream: str, provider_ids: Collection[str]) -> None:
    calls = await _calls(conn, upstream, provider_ids)
    cost = UpstreamCost
    mine = cost.upstream == upstream, cost.provider_id.in_(sorted(provider_ids))
    seen: set[str] = set()
    for row in (await conn.execute(select(cost.__table__).where(*mine).order_by(*_ORDER))).all():
        found = judge(row.amount, calls.get(row.provider_id), is_first=row.provider_id not in seen)
        if row.amount >= 0:
            seen.add(row.provider_id)
        if (found.matched, found.account) != (row.matched, row.account):
            place = cost.upstream == upstream, cost.row_id == row.row_id
            await conn.execute(update(cost).where(*place).values(matched=found.matched, account=found.account))


async def _calls(conn: AsyncConnection, upstream: str, provider_ids: Collection[str]) -> Mapping[str, KnownCall]:
    call = UpstreamCall
    mine = call.upstream == upstream, call.provider_id.in_(sorted(provider_ids)), call.provider_id != ""
    rows = await conn.execute(select(call.provider_id, call.state, call.drift, call.expected_cost).where(*mine))
    return {row.provider_id: KnownCall(row.state, row.drift, row.expected_cost) for row in rows}


class CostSums(msgspec.Struct, frozen=True):
    """The bill of one upstream, and what our calls should have cost. Micro-units."""

    upstream: str
    billed: int
    matched: int
    drift: Mapping[str, int]
    """The rest of the bill by account; a negative number is less than was expected."""
    unbilled: int
    """The expected cost of calls for which no row has come."""
    num_unbilled: int


async def sums(conn: AsyncConnection) -> list[CostSums]:
    cost, call = UpstreamCost, UpstreamCall
    query = select(cost.upstream, cost.account, func.sum(cost.amount), func.sum(cost.matched))
    rows = (await conn.execute(query.group_by(cost.upstream, cost.account))).all()
    same = cost.upstream == call.upstream, cost.provider_id == call.provider_id, cost.provider_id != ""
    has_row = select(cost.row_id).where(*same).exists()
    open_calls = select(call.upstream, func.sum(call.expected_cost), func.count())
    left = {
        row[0]: (int(row[1]), row[2]) for row in await conn.execute(open_calls.where(~has_row).group_by(call.upstream))
    }
    found: list[CostSums] = []
    for upstream in sorted({row[0] for row in rows} | left.keys()):
        mine = [row for row in rows if row[0] == upstream]
        drift = {account: int(billed) - int(matched) for _, account, billed, matched in mine if account}
        billed, matched = (sum(int(row[place]) for row in mine) for place in (2, 3))
        found.append(CostSums(upstream, billed, matched, drift, *left.get(upstream, (0, 0))))
    return found


def wrong_rows() -> Any:
    """Selects the rows of a bill that are neither matched nor in a named account, or that match more than they may."""
    cost = UpstreamCost
    is_whole = and_(cost.account == "", cost.matched == cost.amount)
    is_drift = and_(cost.account != "", cost.account.in_(NAMES), cost.matched >= 0)
    return select(cost.row_id).where(~or_(is_whole, is_drift))


_ORDER = (UpstreamCost.billed_at_ms, UpstreamCost.row_id)
