"""The equations about what was bought of others: tokens that providers state, and money that they bill."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from functools import cache
from typing import Any

from sqlalchemy import Select, and_, bindparam, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.books import equations
from accounting.books.equations import EquationResult
from accounting.tables.models import LedgerEntry
from accounting.tables.upstream_models import UpstreamCall, UpstreamCost, UpstreamCostDay
from accounting.upstreams import cost_days, cost_pulls, costs
from accounting.values.periods import date_of
from accounting.values.types import TOKEN_CLASSES

MAX_FAILURES = 100
ROOT = "upstream:"


async def bought_tokens(conn: AsyncConnection, running: Collection[str]) -> EquationResult:
    """A statement equals what was judged, or the difference has a name; and what is billed is what was judged."""
    failures = await _names(conn, _wrong_tokens(), running)
    num_checked = await conn.scalar(_NUM_CALLS) or 0
    return EquationResult(equations.BOUGHT_TOKENS, num_checked, tuple(sorted(set(failures))[:MAX_FAILURES]))


# Statements are made once: to build one takes longer than to run it over small books.

_NUM_CALLS = select(func.count()).select_from(UpstreamCall)
_NUM_COSTS = select(func.count()).select_from(UpstreamCost)


@cache
def _wrong_tokens() -> tuple[Select[str], ...]:
    call = UpstreamCall
    differs = or_(*(_of("stated", name) != _of("judged", name) for name in TOKEN_CLASSES))
    judged_nothing = and_(*(_of("judged", name) == 0 for name in TOKEN_CLASSES))
    unnamed = and_(call.state == "delivered", call.has_statement, differs, call.drift == "")
    false_name = and_(call.state == "delivered", call.has_statement, ~differs, call.drift != "")
    no_name = and_(call.state != "failed", ~call.has_statement, call.drift == "")
    paid_failure = and_(call.state == "failed", ~judged_nothing)
    wrong = select(call.request_id).where(or_(unnamed, false_name, no_name, paid_failure))
    entry = LedgerEntry
    billed = or_(*(func.sum(_of("judged", name)) < getattr(entry, name) for name in TOKEN_CLASSES))
    joined = select(entry.request_id).join(call, call.request_id == entry.request_id, isouter=True)
    settled = joined.where(entry.kind == "settle", entry.root.startswith(ROOT, autoescape=True))
    counts = [getattr(entry, name) for name in TOKEN_CLASSES]
    over = settled.group_by(entry.request_id, *counts).having(or_(func.count(call.request_id) == 0, billed))
    return tuple(query.limit(bindparam("most")) for query in (wrong, over))


async def bought_money(conn: AsyncConnection) -> EquationResult:
    """Every micro-unit of a provider's bill is matched, or stands in a named account; no call is matched twice."""
    failures = await _names(conn, _wrong_costs())
    num_checked = await conn.scalar(_NUM_COSTS) or 0
    return EquationResult(equations.BOUGHT_MONEY, num_checked, tuple(sorted(set(failures))[:MAX_FAILURES]))


@cache
def _wrong_costs() -> tuple[Select[str], ...]:
    cost, call = UpstreamCost, UpstreamCall
    same = and_(call.upstream == cost.upstream, call.provider_id == cost.provider_id)
    twice = select(cost.row_id).join(call, same, isouter=True).group_by(cost.upstream, cost.provider_id, cost.row_id)
    too_much = twice.having(func.sum(cost.matched) > func.coalesce(func.sum(call.expected_cost), 0))
    of_call = select(func.min(cost.row_id)).where(cost.matched > 0).group_by(cost.upstream, cost.provider_id)
    several = of_call.having(func.count() > 1)
    return tuple(query.limit(bindparam("most")) for query in (costs.wrong_rows(), too_much, several))


async def bought_days(conn: AsyncConnection) -> EquationResult:
    """The days as they are compared hold all that was billed, each difference has a name, and revisions count from 1."""
    gaps, in_force = _days()
    failures = {f"{one.upstream} {date_of(one.day)}" for one in await conn.execute(gaps)}
    left: defaultdict[tuple[str, str], int] = defaultdict(int)
    for upstream, currency, amount in await conn.execute(in_force):
        left[upstream, currency] = int(amount)
    ours, num_checked = await cost_days.currency(conn), 0
    for upstream, days in (await cost_days.compare(conn)).items():
        num_checked += len(days)
        of_days = cost_days.sums(days)
        left[upstream, ours] -= of_days.expected + sum(of_days.drift.values()) + of_days.credit
        for currency, amount in of_days.others.items():
            left[upstream, currency] -= amount
        failures |= {f"{upstream} {date_of(day.facts.day)}" for day in days if day.account not in cost_days.NAMES}
    failures |= {f"{upstream} {currency}" for (upstream, currency), amount in left.items() if amount}
    return EquationResult(equations.BOUGHT_DAYS, num_checked, tuple(sorted(failures)[:MAX_FAILURES]))


@cache
def _days() -> tuple[Any, Any]:
    """Selects days of which a revision is missing, and what was billed by upstream and currency."""
    row = UpstreamCostDay
    keys = (row.upstream, row.day, row.line_item, row.currency)
    gaps = select(row.upstream, row.day).group_by(*keys).having(func.max(row.revision) != func.count()).distinct()
    in_force = select(row.upstream, row.currency, func.sum(row.amount)).where(cost_pulls.is_in_force())
    return gaps.limit(MAX_FAILURES), in_force.group_by(row.upstream, row.currency)


def _of(kind: str, name: str) -> Any:
    return getattr(UpstreamCall, f"{kind}_{name}")


async def _names(conn: AsyncConnection, statements: tuple[Select[str], ...], skip: Collection[str] = ()) -> list[str]:
    most = {"most": MAX_FAILURES + len(skip)}
    found = [name for query in statements for name in (await conn.execute(query, most)).scalars()]
    return [name for name in found if name not in skip]
