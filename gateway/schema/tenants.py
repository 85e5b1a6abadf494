"""The body and the object of `/admin/v1/tenants`. The module holds shapes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import UNSET, Meta, UnsetType

from accounting.lifecycle.erasure import ErasureReport
from accounting.limits.limit_preview import Preview, Trial
from accounting.values.budget_types import Budget
from accounting.values.tenant_types import TenantInfo
from accounting.values.time_zones import UTC
from accounting.values.types import CacheIsolation, CacheShare, Limits, Tier
from gateway.base import errors
from gateway.schema import request_limits
from gateway.schema.convert import OwnBody, convert
from gateway.schema.request_limits import Count


class TenantChanges(OwnBody, frozen=True):
    """Changes of a tenant. An absent field stays as it was; null sets the default."""

    suspended: bool | UnsetType = UNSET
    time_zone: str | UnsetType = UNSET
    max_requests_per_1_minute: Count | UnsetType = UNSET
    max_tokens_per_1_minute: Count | UnsetType = UNSET
    max_running_requests: Count | UnsetType = UNSET
    weight: Annotated[float, Meta(gt=0)] | UnsetType = UNSET
    cache_quota_blocks: Count | UnsetType = UNSET
    cache_floor_blocks: Count | UnsetType = UNSET
    cache_ttl_s: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    cache_read: bool | UnsetType = UNSET
    cache_write: bool | UnsetType = UNSET
    stores_responses: bool | UnsetType = UNSET
    cache_moves_volatile: bool | UnsetType = UNSET
    cache_isolation: CacheIsolation | UnsetType = UNSET
    buys_overflow: bool | UnsetType = UNSET


class LimitsToTry(OwnBody, frozen=True):
    """Limits whose effect on past requests is asked for: those of a minute together, or one of a day, or a budget.
    Without `model` they are those over all models, and without `api_key_id` those over all keys.
    """

    max_requests_per_1_minute: Count | None = None
    max_tokens_per_1_minute: Count | None = None
    max_input_tokens_per_1_minute: Count | None = None
    max_output_tokens_per_1_minute: Count | None = None
    max_requests_per_1_day: Count | None = None
    limit_micro_units: Count | None = None
    """The limit of a budget."""
    period: Literal["hour", "day", "month"] | None = None
    """The period of the budget, which `limit_micro_units` needs."""
    tier: Tier | None = None
    """The one tier that the budget binds. Other limits bind no batches."""
    model: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    api_key_id: str | None = None

    def trial(self, tenant_id: str) -> Trial:
        """Raises `ApiError` 400 where there is no limit: such a preview would refuse nothing, whatever holds for the
        tenant. It does so for limits of several kinds, too, which are not counted together.
        """
        minutes = {field: getattr(self, name) for name, field in MINUTE_LIMITS.items()}
        limits = {**minutes, "day": self.max_requests_per_1_day, "budget": self.limit_micro_units}
        given = {name for name, limit in limits.items() if limit is not None}
        num_kinds = len(given - minutes.keys()) + bool(given & minutes.keys())
        if num_kinds == 0:
            *first, last = (f"'{name}'" for name in (*MINUTE_LIMITS, "max_requests_per_1_day", "limit_micro_units"))
            message = f"Missing required parameter: {', '.join(first)} or {last}."
            raise errors.invalid(message, "max_requests_per_1_minute", "missing_required_parameter")
        if num_kinds > 1:
            raise errors.invalid("Limits of a minute, a limit of a day and a budget are each tried alone.")
        if (self.limit_micro_units is None) != (self.period is None):
            raise errors.invalid("A budget has both 'limit_micro_units' and 'period'.", "period")
        if self.tier is not None and self.limit_micro_units is None:
            raise errors.invalid("Only a budget binds one tier: 'tier' needs 'limit_micro_units'.", "tier")
        budget = None
        if self.limit_micro_units is not None and self.period is not None:
            budget = Budget(
                id="", tenant_id=tenant_id, period=self.period, limit_micro_units=self.limit_micro_units, tier=self.tier
            )
        return Trial(
            **minutes,
            requests_per_day=self.max_requests_per_1_day,
            budget=budget,
            model=self.model,
            key_id=self.api_key_id,
        )


MINUTE_LIMITS = {
    f"max_{unit}_per_1_minute": f"{unit}_per_minute" for unit in ("requests", "tokens", "input_tokens", "output_tokens")
}
"""The limits of a minute that can be tried, by their names in the API and in the books."""


class Wanted(NamedTuple):
    """The wanted state of a tenant after the change. None means that this part was not asked for."""

    suspended: bool | None
    limits: Limits | None
    shares: tuple[float, CacheShare] | None
    """The weight and the cache share."""
    time_zone: str | None
    stores_responses: bool | None
    buys_overflow: bool | None


def wanted(body: Mapping[str, Any], before: TenantInfo) -> Wanted:
    """Computes the wanted state. Raises `ApiError` 400."""
    given = convert(body, TenantChanges)

    def after(name: str, was: Any, default: Any) -> Any:
        value = getattr(given, name)
        return default if _is_null(body, name) else was if value is UNSET else value

    default = CacheShare()
    share = {
        name: after(f"cache_{name}", getattr(before.cache, name), getattr(default, name))
        for name in CacheShare.__struct_fields__
    }
    limits = {field: after(name, getattr(before.limits, field), None) for name, field in request_limits.NAMES.items()}
    shares = any(name == "weight" or name.startswith("cache_") for name in body)
    return Wanted(
        None if given.suspended is UNSET else given.suspended,
        Limits(**limits) if not request_limits.NAMES.keys().isdisjoint(body) else None,
        (after("weight", before.weight, 1.0), CacheShare(**share)) if shares else None,
        after("time_zone", before.time_zone, UTC) if "time_zone" in body else None,
        after("stores_responses", before.stores_responses, True) if "stores_responses" in body else None,
        after("buys_overflow", before.buys_overflow, False) if "buys_overflow" in body else None,
    )


def _is_null(body: Mapping[str, Any], name: str) -> bool:
    return name in body and body[name] is None


def tenant(info: TenantInfo, currency: str) -> dict[str, Any]:
    return {
        "id": info.id,
        "object": "tenant",
        "name": info.name,
        "status": info.status,
        "weight": info.weight,
        "time_zone": info.time_zone,
        "currency": currency,
        "stores_responses": info.stores_responses,
        "buys_overflow": info.buys_overflow,
        "suspended": info.status == "suspended",
        "created_at": info.created_at,
        "archived_at": info.archived_at,
        **request_limits.shown(info.limits),
        **{f"cache_{name}": getattr(info.cache, name) for name in CacheShare.__struct_fields__},
    }


def limit_preview(tenant_id: str, asked: LimitsToTry, found: Preview) -> dict[str, Any]:
    return {
        "object": "limits.preview",
        "project_id": tenant_id,
        **{name: getattr(asked, name) for name in asked.__struct_fields__},
        "start_time": found.start,
        "end_time": found.end,
        "num_requests": found.num_requests,
        "num_refused": found.num_refused,
        "num_minutes": found.num_minutes,
        "num_hours": found.num_hours,
    }


def erased(report: ErasureReport) -> dict[str, Any]:
    return {
        "id": report.tenant_id,
        "object": "tenant.deleted",
        "deleted": True,
        "erased_at": report.erased_at,
        "num_keys": report.num_keys,
        "num_files": report.num_files,
        "num_answers": report.num_answers,
        "data_key_destroyed": report.data_key_destroyed,
    }
