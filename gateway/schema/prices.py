"""Bodies and objects of `/admin/v1/price-sheets`. The module holds shapes only; times are Unix seconds, rates
integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from accounting.prices.previews import NUM_DAYS, Effect, MonthBy
from accounting.prices.price_lists import Assignment, SheetVersion
from accounting.prices.pricing import MAX_RATE
from accounting.values.periods import LAST_SECOND
from accounting.values.types import Rates, Tier
from gateway.schema import forms
from gateway.schema.convert import OwnBody

Name = Annotated[str, Meta(min_length=1, max_length=100, pattern=forms.SHEET_NAME)]
Model = Annotated[str, Meta(min_length=1, max_length=300)]
Rate = Annotated[int, Meta(ge=0, le=MAX_RATE)]
Second = Annotated[int, Meta(ge=0, le=LAST_SECOND)]


class ModelRates(OwnBody, frozen=True):
    """Rates of a model in micro-units per million tokens."""

    model: Model
    cache_read: Rate
    cache_write: Rate
    uncached: Rate
    output: Rate
    tier: Tier = "interactive"


class ResidencyRates(OwnBody, frozen=True):
    """Rates of kept KV in micro-units per GB and hour."""

    model: Model
    cache: Rate = 0
    pinned: Rate = 0


class NewSheetVersion(OwnBody, frozen=True, rename={"from_": "from"}):
    sheet: Name
    rates: Annotated[list[ModelRates], Meta(min_length=1, max_length=2000)]
    currency: Annotated[str, Meta(pattern=forms.CURRENCY)] | None = None
    """The currency of a new sheet; the default is USD."""
    from_: Second | None = None
    """The default is now."""
    until: Second | None = None
    residency: list[ResidencyRates] = msgspec.field(default_factory=list)

    def table(self) -> dict[tuple[str, Tier], Rates]:
        return {(r.model, r.tier): Rates(r.cache_read, r.cache_write, r.uncached, r.output) for r in self.rates}


class NewAssignment(OwnBody, frozen=True, rename={"from_": "from"}):
    sheet: Name
    from_: Second | None = None
    until: Second | None = None


def sheet_version(found: SheetVersion) -> dict[str, Any]:
    return {
        "id": found.id,
        "object": "price_sheet.version",
        "sheet": found.sheet,
        "version": found.version,
        "currency": found.currency,
        "from": found.from_ms // 1000,
        "until": _second(found.until_ms),
        "created_at": found.created_at,
        "rates": [{"model": r.model, "tier": r.tier, **msgspec.structs.asdict(r.rates)} for r in found.rates],
        "residency": [msgspec.structs.asdict(r) for r in found.residency],
    }


def unpriced(found: Sequence[tuple[str, Tier]]) -> dict[str, Any]:
    """Returns the models and tiers without a price; requests for these are refused."""
    return {"unpriced": [{"model": model, "tier": tier} for model, tier in found]}


def preview(sheet: str, currency: str, found: Sequence[Effect]) -> dict[str, Any]:
    return {
        "object": "price_sheet.preview",
        "sheet": sheet,
        "currency": currency,
        "num_days": NUM_DAYS,
        "data": [_effect(one) for one in found],
    }


def month_by(period: str, version: SheetVersion, percent: int, found: MonthBy) -> dict[str, Any]:
    tenants = found.tenants.items
    return {
        "object": "list",
        "period": period,
        "price_version": version.id,
        "change_percent": percent,
        "currency": found.currency,
        "other_currencies": found.other_currencies,
        "models": [_effect(one) for one in found.models],
        "data": [
            {
                "project_id": one.tenant_id,
                "num_requests": one.num_requests,
                "num_unpriced": one.num_unpriced,
                "charged_micro_units": one.charged,
                "priced_micro_units": one.priced,
                "difference_micro_units": one.priced - one.charged,
            }
            for one in tenants
        ],
        "first_id": tenants[0].tenant_id if tenants else None,
        "last_id": tenants[-1].tenant_id if tenants else None,
        "has_more": found.tenants.has_more,
    }


def _effect(one: Effect) -> dict[str, Any]:
    return {
        "model": one.model,
        "tier": one.tier,
        "num_requests": one.num_requests,
        "quantity": sum(msgspec.structs.astuple(one.usage)),
        "charged_micro_units": one.charged,
        "priced_micro_units": one.priced,
        "difference_micro_units": None if one.priced is None else one.priced - one.charged,
    }


def assigned(tenant_id: str, intervals: list[Assignment]) -> dict[str, Any]:
    return {
        "id": tenant_id,
        "object": "tenant.price_sheet",
        "intervals": [{"sheet": i.sheet, "from": i.from_ms // 1000, "until": _second(i.until_ms)} for i in intervals],
    }


def _second(time_ms: int | None) -> int | None:
    return None if time_ms is None else time_ms // 1000
