"""The equations about what was bought of others: tokens that providers state, and money that they bill."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Select, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.books import equations
from accounting.books.equations import EquationResult
from accounting.tables.models import LedgerEntry
from accounting.tables.upstream_models import UpstreamCall, UpstreamCost
from accounting.upstreams import costs
from accounting.values.types import TOKEN_CLASSES

MAX_FAILURES = 100
ROOT = "upstream:"


async def bought_tokens(conn: AsyncConnection, running: Collection[str]) -> EquationResult:
    """A statement equals what was judged, or the difference has a name; and what is billed is what was judged."""
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
    failures = [*await _names(conn, wrong, running), *await _names(conn, over, running)]
    num_checked = await conn.scalar(select(func.count()).select_from(call)) or 0
    return EquationResult(equations.BOUGHT_TOKENS, num_checked, tuple(sorted(set(failures))[:MAX_FAILURES]))


async def bought_money(conn: AsyncConnection) -> EquationResult:
    """Every micro-unit of a provider's bill is matched, or stands in a named account; no call is matched twice."""
    cost, call = UpstreamCost, UpstreamCall
    same = and_(call.upstream == cost.upstream, call.provider_id == cost.provider_id)
    twice = select(cost.row_id).join(call, same, isouter=True).group_by(cost.upstream, cost.provider_id, cost.row_id)
    too_much = twice.having(func.sum(cost.matched) > func.coalesce(func.sum(call.expected_cost), 0))
    of_call = select(func.min(cost.row_id)).where(cost.matched > 0).group_by(cost.upstream, cost.provider_id)
    several = of_call.having(func.count() > 1)
    failures = [*await _names(conn, costs.wrong_rows()), *await _names(conn, too_much), *await _names(conn, several)]
    num_checked = await conn.scalar(select(func.count()).select_from(cost)) or 0
    return EquationResult(equations.BOUGHT_MONEY, num_checked, tuple(sorted(set(failures))[:MAX_FAILURES]))


def _of(kind: str, name: str) -> Any:
    return getattr(UpstreamCall, f"{kind}_{name}")


async def _names(conn: AsyncConnection, query: Select[Any], skip: Collection[str] = ()) -> list[str]:
    found = (await conn.execute(query.limit(MAX_FAILURES + len(skip)))).scalars()
    return [name for name in found if name not in skip]
