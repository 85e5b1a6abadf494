"""The body and the object of `/admin/v1/tenants`. The module holds shapes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from accounting.lifecycle.erasure import ErasureReport
from accounting.limits.limit_preview import Preview
from accounting.values.tenant_types import TenantInfo
from accounting.values.time_zones import UTC
from accounting.values.types import CacheIsolation, CacheShare, Limits
from gateway.base import errors
from gateway.schema import request_limits
from gateway.schema.convert import convert
from gateway.schema.request_limits import Count


class TenantChanges(msgspec.Struct, frozen=True):
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


class LimitsToTry(msgspec.Struct, frozen=True):
    """Limits whose effect on past requests is asked for. Without `model` they are those over all models."""

    max_requests_per_1_minute: Count | None = None
    max_tokens_per_1_minute: Count | None = None
    model: Annotated[str, Meta(min_length=1, max_length=200)] | None = None

    @property
    def limits(self) -> Limits:
        """Raises `ApiError` 400 where there is none: such a preview would refuse nothing, whatever holds for the tenant."""
        if self.max_requests_per_1_minute is None and self.max_tokens_per_1_minute is None:
            message = "Missing required parameter: 'max_requests_per_1_minute' or 'max_tokens_per_1_minute'."
            raise errors.invalid(message, "max_requests_per_1_minute", "missing_required_parameter")
        return Limits(self.max_requests_per_1_minute, self.max_tokens_per_1_minute)


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
        "model": asked.model,
        "max_requests_per_1_minute": asked.max_requests_per_1_minute,
        "max_tokens_per_1_minute": asked.max_tokens_per_1_minute,
        "start_time": found.start,
        "end_time": found.end,
        "num_requests": found.num_requests,
        "num_refused": found.num_refused,
        "num_minutes": found.num_minutes,
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
