"""Blocks of the tree per tenant, and their integral over time: block-milliseconds, reported and not priced.

A node counts for the tenant that inserted it, once, however many sequences stand on it; public nodes so count for the
operator. Private blocks are the engine's to count: it knows whose sequence a table belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(slots=True)
class TenantBlocks:
    num_held: int = 0
    """Under a running sequence or a pin."""
    num_retained: int = 0
    """Evictable."""
    held_block_ms: int = 0
    retained_block_ms: int = 0
    since_ms: int = 0
    """The integrals are complete up to this time of the injected clock."""


class Usage:
    """Integrated lazily, at each change: O(1), nothing runs while nothing changes."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._tenants: dict[str, TenantBlocks] = {}

    def change(self, tenant: str, *, held: int = 0, retained: int = 0) -> None:
        blocks = self._up_to_now(tenant)
        blocks.num_held += held
        blocks.num_retained += retained

    def of(self, tenant: str) -> TenantBlocks:
        """A copy, integrated up to now; zeros for a tenant that never inserted anything."""
        if tenant not in self._tenants:
            return TenantBlocks(since_ms=self._now_ms())
        return replace(self._up_to_now(tenant))

    def tenants(self) -> tuple[str, ...]:
        return tuple(self._tenants)

    def _up_to_now(self, tenant: str) -> TenantBlocks:
        now = self._now_ms()
        blocks = self._tenants.get(tenant)
        if blocks is None:
            blocks = self._tenants[tenant] = TenantBlocks(since_ms=now)
        elapsed = now - blocks.since_ms
        blocks.held_block_ms += elapsed * blocks.num_held
        blocks.retained_block_ms += elapsed * blocks.num_retained
        blocks.since_ms = now
        return blocks
