"""Bodies and objects of `/admin/v1/budgets` and `/admin/v1/quotas`. The module holds shapes only; times are Unix
seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from accounting.limits.budgets import NewBudget
from accounting.limits.spend import Alert
from accounting.values import time_zones
from accounting.values.budget_types import Budget, Dimension, Hardness, Level, Period, Quota
from accounting.values.types import Tier
from gateway.schema import forms
from gateway.schema.convert import OwnBody

Amount = Annotated[int, Meta(ge=0, le=2**53 - 1)]
Change = Annotated[int, Meta(ge=-(2**53) + 1, le=2**53 - 1)]
Currency = Annotated[str, Meta(pattern=forms.CURRENCY)]
Moment = Annotated[int, Meta(ge=0, le=10**10)]


class FixedPeriod(OwnBody, frozen=True):
    start: Moment
    end: Moment


class BudgetFields(OwnBody, frozen=True):
    project_id: str
    period: Literal["hour", "day", "month"] | FixedPeriod
    limit_micro_units: Amount
    api_key_id: str | None = None
    model: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    tier: Tier | None = None
    hard: bool = True
    shadow: bool = False
    currency: Currency | None = None
    """The currency that the project pays in. Another one is refused."""

    def new(self) -> NewBudget:
        fixed = self.period if isinstance(self.period, FixedPeriod) else None
        return NewBudget(
            tenant_id=self.project_id,
            limit_micro_units=self.limit_micro_units,
            period="fixed" if isinstance(self.period, FixedPeriod) else self.period,
            start_ms=fixed.start * 1000 if fixed else 0,
            end_ms=fixed.end * 1000 if fixed else 0,
            key_id=self.api_key_id,
            model=self.model,
            tier=self.tier,
            hardness=_hardness(self.hard, self.shadow),
        )


class BudgetChanges(OwnBody, frozen=True):
    limit_micro_units: Amount | None = None
    hard: bool | None = None
    shadow: bool | None = None
    currency: Currency | None = None

    def hardness(self, before: Hardness) -> Hardness:
        hard = before == "hard" if self.hard is None else self.hard
        shadow = before == "shadow" if self.shadow is None else self.shadow
        return _hardness(hard, shadow)


class NewAdjustment(OwnBody, frozen=True, rename={"from_": "from"}):
    micro_units: Change
    from_: Moment
    to: Moment
    currency: Currency | None = None


class QuotaFields(OwnBody, frozen=True):
    project_id: str
    level: Level
    dimension: Dimension
    subject: str = ""
    limit: Amount | None = None
    """A value of None removes the quota."""
    shadow: bool = False


def budget(
    budget: Budget, now_ms: int, used: int, alerts: list[Alert], time_zone: str, currency: str
) -> dict[str, Any]:
    period = budget.period_at(now_ms)
    return {
        "id": budget.id,
        "object": "budget",
        "project_id": budget.tenant_id,
        "api_key_id": budget.key_id,
        "model": budget.model,
        "tier": budget.tier,
        "period": _period(budget),
        "limit_micro_units": budget.limit_micro_units,
        "currency": currency,
        "hard": budget.hardness == "hard",
        "shadow": budget.hardness == "shadow",
        "created_at": budget.created_at,
        "adjustments": [
            {"id": a.id, "micro_units": a.micro_units, "from": a.from_ms // 1000, "to": a.until_ms // 1000}
            for a in budget.adjustments
        ],
        "current": None if period is None else _current(budget, period, now_ms, used, alerts, time_zone),
    }


def quota(tenant_id: str, quota: Quota) -> dict[str, Any]:
    return {
        "object": "quota",
        "project_id": tenant_id,
        "level": quota.level,
        "subject": quota.subject or None,
        "dimension": quota.dimension,
        "limit": quota.limit,
        "shadow": quota.shadow,
    }


def _current(
    budget: Budget, period: Period, now_ms: int, used: int, alerts: list[Alert], time_zone: str
) -> dict[str, Any]:
    """Returns the current period, with its end in the tenant's time zone. `settled_micro_units` is the ledger's amount;
    the limiter knows the amount that is held in addition.
    """
    return {
        "start": period.start_ms // 1000,
        "end": period.end_ms // 1000,
        "end_local": time_zones.shown(period.end_ms // 1000, time_zone),
        "limit_micro_units": budget.limit_at(now_ms),
        "settled_micro_units": used,
        "thresholds": [alert.threshold for alert in alerts if alert.period_start_ms == period.start_ms],
    }


def _period(budget: Budget) -> str | dict[str, int]:
    if budget.period != "fixed":
        return budget.period
    return {"start": budget.start_ms // 1000, "end": budget.end_ms // 1000}


def _hardness(hard: bool, shadow: bool) -> Hardness:
    return "shadow" if shadow else "hard" if hard else "soft"
