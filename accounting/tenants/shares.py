"""A tenant's share of a busy worker: weight and cache share, checked and turned into columns. The module runs no
statement."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row

from accounting.values.errors import InvalidError
from accounting.values.types import CacheShare

MAX_WEIGHT_PERCENT = 10_000
MAX_CACHE_TTL_S = 3600
"""The longest pin. Blocks that nobody uses for an hour leave every worker's cache, so a pin cannot promise more."""


def columns(weight: float, cache: CacheShare) -> dict[str, Any]:
    """Returns the values by column name. Raises InvalidError."""
    _check_cache(cache)
    return {
        "weight_percent": _weight_percent(weight),
        "cache_floor_blocks": cache.floor_blocks,
        "cache_quota_blocks": cache.quota_blocks,
        "cache_ttl_s": cache.ttl_s,
        "cache_read": cache.read,
        "cache_write": cache.write,
        "cache_moves_volatile": cache.moves_volatile,
        "cache_isolation": cache.isolation,
    }


def _weight_percent(weight: float) -> int:
    if not 0.01 <= weight <= MAX_WEIGHT_PERCENT / 100:  # before it is rounded: a percentage of 1e308 is infinite
        raise InvalidError("A weight is between 0.01 and 100.", "weight")
    return round(weight * 100)


def _check_cache(cache: CacheShare) -> None:
    if cache.floor_blocks < 0 or (cache.quota_blocks or 0) < 0:
        raise InvalidError("A number of blocks must not be negative.", "cache_floor_blocks")
    if cache.quota_blocks is not None and cache.floor_blocks > cache.quota_blocks:
        raise InvalidError("The floor must not be above the quota.", "cache_floor_blocks")
    if cache.ttl_s is not None and not 1 <= cache.ttl_s <= MAX_CACHE_TTL_S:
        raise InvalidError(f"The time must be 1 to {MAX_CACHE_TTL_S} seconds.", "cache_ttl_s")


def cache_share(row: Row[Any]) -> CacheShare:
    return CacheShare(**{name: getattr(row, f"cache_{name}") for name in CacheShare.__struct_fields__})
