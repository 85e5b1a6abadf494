"""Figures of the cache tiers below the device, in one form for all of them. The module reads and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.prefix_cache import PrefixCache
from workers.engine.tiers.restores import Restores
from workers.engine.tiers.shared_cache.shared import SharedTier


@dataclass(frozen=True, slots=True)
class TierFigures:
    """Counts since the process began, except for `num_used_bytes`."""

    num_hit_tokens: int = 0
    """Number of tokens that were copied one tier nearer to the device."""
    num_bytes_in: int = 0
    num_bytes_out: int = 0
    num_used_bytes: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    """Number of blocks in the host, or values in the shared tier, that were not written or not taken, by reason."""


def figures(cache: PrefixCache, restores: Restores | None, shared: SharedTier | None) -> dict[str, TierFigures]:
    """Returns the figures of the tiers that exist, without the device's own."""
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
    counts = shared.store_thread.counts
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
