"""`cache_control`: a marker of where a client wants the prompt cached. The module is pure.

The cache finds the longest known beginning of every prompt by itself, so a marker has nothing to switch on; neither has
its `ttl`, for a block stays as long as memory allows. A marker is checked, and changes nothing.
"""

from __future__ import annotations

from typing import Any

from gateway.base import errors


def check_cache_control(marker: Any, where: str) -> None:
    """Raises `ApiError` 400 for a marker that Anthropic's API does not define."""
    if marker is None:
        return
    place = f"{where}.cache_control" if where else "cache_control"
    if not isinstance(marker, dict) or marker.get("type") != "ephemeral":
        raise errors.invalid(f'\'{place}\' must be an object with "type": "ephemeral".', place)
    if marker.get("ttl") not in (None, "5m", "1h"):
        raise errors.invalid(f"'{place}.ttl' must be '5m' or '1h'.", f"{place}.ttl")
