"""What the tiers behind the device did, in figures of one form for all of them. Reads; changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.prefix_cache import PrefixCache
from workers.engine.tiers.restores import Restores
from workers.engine.tiers.shared_cache.shared import SharedTier

TIERS = ("device", "host", "shared")


@dataclass(frozen=True, slots=True)
class TierFigures:
    """Counts since the process began, but for `num_used_bytes`."""

    num_hit_tokens: int = 0
    """Brought one tier nearer to the device."""
    num_bytes_in: int = 0
    num_bytes_out: int = 0
    num_used_bytes: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """By why something was not written, or not taken: blocks in the host, values in the shared tier."""


def figures(cache: PrefixCache, restores: Restores | None, shared: SharedTier | None) -> dict[str, TierFigures]:
    """Of the tiers that there are, the device's own aside."""
    found: dict[str, TierFigures] = {}
    if cache.host is not None and restores is not None:
        found["host"] = _host(cache, restores)
    if shared is not None:
        found["shared"] = _shared(shared, cache.block_size)
    return found


def _host(cache: PrefixCache, restores: Restores) -> TierFigures:
    host, counts, width = cache.host, restores.counts, restores.bytes_per_block
    assert host is not None
    return TierFigures(
        num_hit_tokens=counts.num_restored * cache.block_size,
        num_bytes_in=counts.num_stored * width,
        num_bytes_out=(counts.num_restored + counts.num_swapped_in) * width,
        num_used_bytes=(host.num_slots - host.num_free) * width,
        refused={"full": host.counts.num_refused, "slower": counts.num_skipped, "no_memory": counts.num_failed},
    )


def _shared(shared: SharedTier, block_size: int) -> TierFigures:
    counts = shared.courier.counts
    return TierFigures(
        num_hit_tokens=shared.num_taken * block_size,
        num_bytes_in=counts.num_bytes_written,
        num_bytes_out=counts.num_bytes_read,
        refused={
            **dict.fromkeys(("truncated", "foreign", "corrupted"), 0),
            **dict[str, int](counts.refused.items()),
            "full": counts.num_dropped,
            "away": counts.num_away,
            "slower": shared.num_skipped,
        },
    )
