"""Periodic checks of the cache: figures each second, its laws once per idle minute. They change nothing, but
a tenant without blocks is forgotten once its figures were taken.

The module knows the cache and the clock, but no metrics and no readers of the logs. It checks one law per idle round,
so that a request that comes meanwhile waits for one law and not for all.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Literal

from cache import invariants
from cache.blocks.usage import TenantBlocks
from cache.prefix_cache import PrefixCache
from workers.engine.tiers.restores import RestoreCounts, Restores
from workers.engine.tiers.shared_cache.shared import SharedTier
from workers.engine.tiers.tier_figures import TierFigures, figures

logger = logging.getLogger(__name__)

FIGURES_EVERY_S = 1.0
LAWS_EVERY_S = 60.0

BlockState = Literal["free", "evictable", "held", "private", "moving"]
"""Each block but the null block is in one state. Of the tree: held under a sequence or a pin, or evictable. Outside of
it: free, private to sequences, or being filled by a copy from another tier."""


@dataclass(frozen=True, slots=True)
class CacheFigures:
    """Counts since the process began, and the present state."""

    blocks: dict[BlockState, int] = field(default_factory=dict)
    num_pinned_blocks: int = 0
    evicted_blocks: dict[str, int] = field(default_factory=dict)
    num_floor_breaches: int = 0
    num_refused_inserts: int = 0
    num_broken_laws: int = 0
    tenants: dict[str, TenantBlocks] = field(default_factory=dict)
    """Tenants that have blocks, or changed since the figures before these."""
    tiers: dict[str, TierFigures] = field(default_factory=dict)
    num_nodes: int = 0
    num_matches: int = 0
    match_s: float = 0.0
    ages: dict[str, tuple[tuple[int, ...], float]] = field(default_factory=dict)
    """The histograms of `CacheCounts` by name: the numbers of blocks, and the sum of seconds."""
    num_swapped_blocks: dict[str, int] = field(default_factory=dict)
    """Numbers of swapped blocks, out to the host and in again."""


class CacheWatch:
    def __init__(self, cache: PrefixCache, restores: Restores | None = None) -> None:
        self.num_broken_laws = 0
        self.shared: SharedTier | None = None
        self._cache = cache
        self._restores = restores
        self._figures_due = 0.0
        self._laws_due: float | None = None
        self._next_law = 0

    def look(self, now: float, *, busy: bool) -> CacheFigures | None:
        """Checks the cache. It is called once per round of the loop, and returns figures if they are due."""
        if busy or self._laws_due is None:
            self._laws_due = now + LAWS_EVERY_S
        elif now >= self._laws_due:
            self._check_one_law()
            if self._next_law == 0:
                self._laws_due = now + LAWS_EVERY_S
        if now < self._figures_due:
            return None
        self._figures_due = now + FIGURES_EVERY_S
        return self._figures()

    def _check_one_law(self) -> None:
        law = invariants.LAWS[self._next_law]
        self._next_law = (self._next_law + 1) % len(invariants.LAWS)
        try:
            broken = list(law(invariants.see(self._cache)))
        except Exception:
            # A state for which the check itself fails is broken too. Serving goes on, and a person must look into it.
            logger.exception("a law of the cache cannot be checked", extra={"event": "cache_law"})
            self.num_broken_laws += 1
            return
        if broken:
            self.num_broken_laws += len(broken)
            logger.error("the cache broke its laws: %s", "; ".join(broken[:3]), extra={"event": "cache_law"})

    def _figures(self) -> CacheFigures:
        cache = self._cache
        counts = cache.counts
        tenants = cache.look()
        ages = {"lifetime": counts.lifetimes, "idle_before_evict": counts.idle_times, "reuse_gap": counts.reuse_gaps}
        return CacheFigures(
            blocks=_blocks(cache, sum(blocks.num_held for blocks in tenants.values())),
            num_pinned_blocks=cache.num_pinned,
            evicted_blocks={str(cause): n for cause, n in counts.num_evicted.items()},
            num_floor_breaches=counts.num_floor_breaches,
            num_refused_inserts=counts.num_refused_inserts,
            num_broken_laws=self.num_broken_laws,
            tenants=tenants,
            tiers=figures(cache, self._restores, self.shared),
            num_nodes=cache.num_nodes,
            num_matches=counts.num_matches,
            match_s=counts.match_s,
            ages={name: (tuple(found.counts), found.sum_s) for name, found in ages.items()},
            num_swapped_blocks=self._swapped(),
        )

    def _swapped(self) -> dict[str, int]:
        counts = RestoreCounts() if self._restores is None else self._restores.counts
        return {"out": counts.num_swapped_out, "in": counts.num_swapped_in}


def _blocks(cache: PrefixCache, num_held: int) -> dict[BlockState, int]:
    """Returns the number of blocks in each state, the null block left out."""
    free, evictable, moving = cache.num_free, cache.num_evictable, cache.num_moving
    private = cache.num_blocks - 1 - free - evictable - num_held - moving
    return {"free": free, "evictable": evictable, "held": num_held, "private": private, "moving": moving}
