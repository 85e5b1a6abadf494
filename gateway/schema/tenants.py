"""Body and object of `/admin/v1/tenants`. Shapes only."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from accounting.types import CacheShare, TenantInfo

Blocks = Annotated[int, Meta(ge=0, le=2**53 - 1)]


class TenantChanges(msgspec.Struct, frozen=True):
    """Absent: unchanged; null: the default."""

    weight: Annotated[float, Meta(gt=0)] | UnsetType | None = UNSET
    cache_quota_blocks: Blocks | UnsetType | None = UNSET
    cache_floor_blocks: Blocks | UnsetType | None = UNSET
    cache_ttl_s: Annotated[int, Meta(ge=1)] | UnsetType | None = UNSET
    cache_read: bool | UnsetType | None = UNSET
    cache_write: bool | UnsetType | None = UNSET

    def weight_after(self, before: TenantInfo) -> float:
        return before.weight if self.weight is UNSET else self.weight or 1.0

    def cache_after(self, before: CacheShare) -> CacheShare:
        default = CacheShare()
        values: dict[str, Any] = {}
        for name in CacheShare.__struct_fields__:
            given = getattr(self, f"cache_{name}")
            if given is UNSET:
                values[name] = getattr(before, name)
            else:
                values[name] = getattr(default, name) if given is None else given
        return CacheShare(**values)


def tenant(info: TenantInfo) -> dict[str, Any]:
    return {
        "id": info.id, "object": "tenant", "name": info.name, "status": info.status, "weight": info.weight,
        **{f"cache_{name}": getattr(info.cache, name) for name in CacheShare.__struct_fields__},
    }  # fmt: skip
