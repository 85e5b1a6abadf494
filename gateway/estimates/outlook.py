"""Whether a batch would be refused or would pause now: its own faults, budgets, and the bound on what waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accounting.values.types import Principal
from gateway.base import errors
from gateway.base.redis_link import LimiterUnavailable
from gateway.estimates.sums import Whole
from gateway.limiter.limits import Limiter
from gateway.limiter.rules import BudgetUse, LimitSubject

ORDER = ("runs", "may_pause", "pauses", "fails")
"""The outlooks, the worst last."""
Reason = tuple[str, dict[str, Any]]
"""The outlook that something gives a batch, and what it is."""


async def of_budgets(limiter: Limiter, principal: Principal, model: str, whole: Whole, now_ms: int) -> Sequence[Reason]:
    """Returns what the hard budgets say that a line of the batch is charged to. Nothing is held. Raises `ApiError`."""
    holder = LimitSubject.of("", principal, model, "batch", now_ms=now_ms)
    try:
        money = (await limiter.peek(holder)).money
    except LimiterUnavailable as reason:
        raise errors.unavailable("limiter_unavailable", "Limits cannot be read right now.") from reason
    found: list[Reason] = []
    for use in holder.budgets:
        if use.budget.hardness != "hard":
            continue
        used = money[use.row]
        room = max(0, use.budget.limit_at(now_ms) - used.used - used.held)
        if room < whole.least or not room:
            found.append(("pauses", _over(use, room, "The batch costs more than this budget has left.")))
        elif room < whole.most:
            found.append(("may_pause", _over(use, room, "The batch may cost more than this budget has left.")))
    return found


def of_spend_limit() -> Reason:
    return "pauses", {"code": "insufficient_quota", "message": "The spend limit of the organization is reached."}


def of_file(code: str, message: str) -> Reason:
    return "fails", {"code": code, "message": message}


def worst(reasons: Sequence[Reason]) -> str:
    return max((outlook for outlook, _ in reasons), key=ORDER.index, default="runs")


def _over(use: BudgetUse, room: int, message: str) -> dict[str, Any]:
    return {
        "code": "insufficient_quota",
        "message": message,
        "budget": use.budget.id,
        "scope": use.budget.scope,
        "remaining_micro_units": room,
        "resets_at": use.period.end_ms // 1000,
    }
