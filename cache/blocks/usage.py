"""Blocks of the tree per tenant: how many, for how long, and how many each may keep.

A node counts for the tenant that inserted it, once, however many sequences use it; public nodes so count for the
operator. The engine counts private blocks, as it knows the tenant of each block table. Integrals are block-milliseconds
of an injected clock, reported and not priced here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Literal, NamedTuple

from cache.blocks.ages import Ages

UNLIMITED = sys.maxsize
FLOOR_SHARE = 0.6
"""The part of the pool that all floors together may take. The rest is for anybody who needs blocks now."""

EvictionCause = Literal["capacity", "quota", "idle"]
OVER_QUOTA, ABOVE_FLOOR, AT_FLOOR = 0, 1, 2
"""The order of tenants in eviction: the lowest rank goes first."""


class Reach(NamedTuple):
    """The blocks that an allocation may take besides free ones."""

    recent: bool
    """It may take blocks that interactive requests used recently."""
    floors: bool
    """It may take the last blocks of tenants with a floor. It is set only with `recent`."""


SHARED = Reach(recent=True, floors=False)
"""The reach of interactive sequences."""
LAST_RESORT = Reach(recent=True, floors=True)
"""The reach of a sequence that would have to stop otherwise."""
COLD = Reach(recent=False, floors=False)
"""The reach of batch beyond one sequence: a batch must not cost live chats their cache."""


class Numbers(NamedTuple):
    """The numbers of a tenant's blocks now."""

    held: int
    retained: int
    recent: int
    floor: int


@dataclass(slots=True)
class TenantBlocks:
    num_held: int = 0
    """The blocks under a running sequence or a pin."""
    num_retained: int = 0
    """The evictable blocks."""
    held_block_ms: int = 0
    retained_block_ms: int = 0
    since_ms: int = 0
    """The integrals are complete up to this time of the injected clock."""
    num_recent: int = 0
    """The evictable blocks that interactive requests used recently."""
    floor: int = 0
    quota: int = UNLIMITED
    num_evicted: int = 0
    """The blocks that were evicted for any tenant's need, its own included."""
    num_evicted_for: int = 0
    """The blocks that any tenant lost for this tenant's need."""
    num_pinned: int = 0
    """The blocks that cannot be evicted because of pins."""
    pinned_block_ms: int = 0

    @property
    def num_blocks(self) -> int:
        return self.num_held + self.num_retained

    @property
    def num_above_floor(self) -> int:
        return max(0, self.num_blocks - self.floor)

    @property
    def is_over(self) -> bool:
        """Whether the tenant has no block and no share, and is forgotten once its integrals were looked at."""
        return not (self.num_held or self.num_retained or self.floor) and self.quota == UNLIMITED


_values = attrgetter(*(one.name for one in fields(TenantBlocks)))


@dataclass(slots=True)
class CacheCounts:
    """Counts since the process began."""

    num_evicted: Counter[EvictionCause] = field(default_factory=Counter)
    """The number of evicted blocks by cause."""
    num_floor_breaches: int = 0
    """The leaves cut below their tenant's floor, so that a sequence could go on."""
    num_refused_inserts: int = 0
    """The commits that a quota cut short: the blocks stayed private."""
    num_matches: int = 0
    match_s: float = 0.0
    """The seconds that all matches took together."""
    lifetimes: Ages = field(default_factory=Ages)
    """The time from a node's insertion to the eviction of its blocks."""
    idle_times: Ages = field(default_factory=Ages)
    """The time from the last use of blocks to their eviction."""
    reuse_gaps: Ages = field(default_factory=Ages)
    """The time for which blocks had been unused when they were used again."""


class Usage:
    """Counts and integrals of all tenants. They are integrated at each change: O(1), and nothing runs while nothing
    changes."""

    def __init__(self, now_ms: Callable[[], int], floor_limit: int = UNLIMITED) -> None:
        """`floor_limit` is the number of blocks that all floors together may promise. A floor beyond it is cut to what
        is left."""
        self.now_ms = now_ms
        self.counts = CacheCounts()
        self.num_evictable = 0
        self._num_above_floors = 0
        self._num_cold_above_floors = 0
        self._floor_limit = floor_limit
        self._sum_of_floors = 0
        self._tenants: dict[str, TenantBlocks] = {}
        self._unseen: dict[str, None] = {}
        """The tenants that changed since the last look, and those that had blocks in it."""

    def change(self, tenant: str, *, held: int = 0, retained: int = 0, recent: int = 0) -> None:
        blocks = self._up_to_now(tenant)
        if blocks.floor == 0:  # the usual case: all evictable blocks are above the floor
            self.num_evictable += retained
            self._num_above_floors += retained
            self._num_cold_above_floors += retained - recent
            blocks.num_held += held
            blocks.num_retained += retained
            blocks.num_recent += recent
            return
        self._leave_sums(blocks)
        blocks.num_held += held
        blocks.num_retained += retained
        blocks.num_recent += recent
        self._enter_sums(blocks)

    def set_share(self, tenant: str, floor: int, quota: int) -> bool:
        """Sets floor and quota. Returns True if they changed."""
        if tenant not in self._tenants and floor == 0 and quota == UNLIMITED:
            return False
        blocks = self._up_to_now(tenant)
        floor = min(floor, quota, self._floor_limit - self._sum_of_floors + blocks.floor)
        if (blocks.floor, blocks.quota) == (floor, quota):
            return False
        self._leave_sums(blocks)
        self._sum_of_floors += floor - blocks.floor
        blocks.floor, blocks.quota = floor, quota
        self._enter_sums(blocks)
        return True

    def pin(self, tenant: str, num_blocks: int) -> None:
        """Counts `num_blocks` more under pins, or fewer if negative."""
        self._up_to_now(tenant).num_pinned += num_blocks

    def num_pinned(self, tenant: str) -> int:
        blocks = self._tenants.get(tenant)
        return 0 if blocks is None else blocks.num_pinned

    def evicted(self, tenant: str, num_blocks: int, cause: EvictionCause, needed_by: str) -> None:
        self.counts.num_evicted[cause] += num_blocks
        if cause != "idle":
            self._tenants[tenant].num_evicted += num_blocks
            if needed_by:
                self._up_to_now(needed_by).num_evicted_for += num_blocks

    def available(self, reach: Reach) -> int:
        """Returns the evictable blocks within that reach. O(1)."""
        if reach.floors:
            return self.num_evictable
        return self._num_above_floors if reach.recent else self._num_cold_above_floors

    def rank(self, tenant: str) -> int:
        blocks = self._tenants[tenant]
        num_blocks = blocks.num_held + blocks.num_retained
        if num_blocks > blocks.quota:
            return OVER_QUOTA
        return ABOVE_FLOOR if num_blocks > blocks.floor else AT_FLOOR

    def of(self, tenant: str) -> TenantBlocks:
        """Returns a copy, integrated up to now; zeros for a tenant that is not known."""
        if tenant not in self._tenants:
            return TenantBlocks(since_ms=self.now_ms())
        return TenantBlocks(*_values(self._up_to_now(tenant)))

    def numbers(self, tenant: str) -> Numbers:
        """Returns the numbers of blocks (for invariants.py); zeros for a tenant that is not known."""
        blocks = self._tenants.get(tenant)
        if blocks is None:
            return Numbers(0, 0, 0, 0)
        return Numbers(blocks.num_held, blocks.num_retained, blocks.num_recent, blocks.floor)

    def look(self) -> dict[str, TenantBlocks]:
        """Returns copies, integrated up to now, of the tenants that have blocks or changed since the last look. Those
        that are over are forgotten: one that comes back begins at zero. O(what is returned)."""
        found = {tenant: self.of(tenant) for tenant in list(self._unseen)}
        self._unseen = {tenant: None for tenant, blocks in found.items() if blocks.num_blocks}
        for tenant, blocks in found.items():
            if blocks.is_over:
                del self._tenants[tenant]
        return found

    def peek(self, tenant: str) -> TenantBlocks | None:
        """Returns the live counts, which must not be changed, or None for a tenant that is not known."""
        return self._tenants.get(tenant)

    def tenants(self) -> tuple[str, ...]:
        return tuple(self._tenants)

    # `available` reads these sums. The functions run at every change of every node, so they are written out for speed.

    def _leave_sums(self, blocks: TenantBlocks) -> None:
        retained = blocks.num_retained
        above = blocks.num_held + retained - blocks.floor
        cold = retained - blocks.num_recent
        self.num_evictable -= retained
        if above > 0:
            self._num_above_floors -= retained if retained < above else above
            self._num_cold_above_floors -= cold if cold < above else above

    def _enter_sums(self, blocks: TenantBlocks) -> None:
        retained = blocks.num_retained
        above = blocks.num_held + retained - blocks.floor
        cold = retained - blocks.num_recent
        self.num_evictable += retained
        if above > 0:
            self._num_above_floors += retained if retained < above else above
            self._num_cold_above_floors += cold if cold < above else above

    def _up_to_now(self, tenant: str) -> TenantBlocks:
        now = self.now_ms()
        blocks = self._tenants.get(tenant)
        if blocks is None:
            blocks = self._tenants[tenant] = TenantBlocks(since_ms=now)
        if elapsed := now - blocks.since_ms:
            blocks.held_block_ms += elapsed * blocks.num_held
            blocks.retained_block_ms += elapsed * blocks.num_retained
            blocks.pinned_block_ms += elapsed * blocks.num_pinned
            blocks.since_ms = now
        self._unseen[tenant] = None
        return blocks
