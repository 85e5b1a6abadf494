"""Body and object of `/admin/v1/tenants`. Shapes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from accounting.types import CacheShare, TenantInfo
from gateway.schema.convert import convert

Blocks = Annotated[int, Meta(ge=0, le=2**53 - 1)]


class TenantChanges(msgspec.Struct, frozen=True):
    weight: Annotated[float, Meta(gt=0)] | UnsetType = UNSET
    cache_quota_blocks: Blocks | UnsetType = UNSET
    cache_floor_blocks: Blocks | UnsetType = UNSET
    cache_ttl_s: Annotated[int, Meta(ge=1)] | UnsetType = UNSET
    cache_read: bool | UnsetType = UNSET
    cache_write: bool | UnsetType = UNSET


def changed(body: Mapping[str, Any], before: TenantInfo) -> tuple[float, CacheShare]:
    """Weight and share after the change. Absent: as it was; null: the default. Raises `ApiError` 400."""
    given = convert(body, TenantChanges)
    nulls = {name for name, value in body.items() if value is None}

    def after(name: str, was: Any, default: Any) -> Any:
        value = getattr(given, name)
        return default if name in nulls else was if value is UNSET else value

    default = CacheShare()
    share = {
        name: after(f"cache_{name}", getattr(before.cache, name), getattr(default, name))
        for name in CacheShare.__struct_fields__
    }
    return after("weight", before.weight, 1.0), CacheShare(**share)


def tenant(info: TenantInfo) -> dict[str, Any]:
    return {
        "id": info.id, "object": "tenant", "name": info.name, "status": info.status, "weight": info.weight,
        **{f"cache_{name}": getattr(info.cache, name) for name in CacheShare.__struct_fields__},
    }  # fmt: skip
