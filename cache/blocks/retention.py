"""Retention independent of age: pins, with and without an end, and drops.

A pin is one more protector on a node, so its whole path stays and no eviction rule needs to know of it. The module knows
how much may be pinned and for how long; cache/blocks/pins.py counts.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence

from cache.blocks.ownership import Ownership
from cache.blocks.pins import Pin
from cache.tree.radix import Node

PASSING_SHARE = 2
"""The divisor for pins that expire: they are set only while all pins together hold less than this part of the pin
limit. The rest is for public prompts."""
TENANT_SHARE = 4
"""One tenant's expiring pins may hold the blocks that all expiring pins may hold, divided by this."""


class Retention:
    def __init__(self, owners: Ownership, pin_limit: int) -> None:
        """`pin_limit` is the number of blocks that all pins together may hold."""
        self.pin_limit = pin_limit
        self.passing_limit = pin_limit // PASSING_SHARE
        self.tenant_limit = self.passing_limit // TENANT_SHARE
        self._pins = owners.pins
        self._due: list[tuple[int, int, int, Node, Pin]] = []
        """A heap by expiry with one entry per pin that expires. The entry may be due earlier than the pin itself."""
        self._numbers = itertools.count()
        self._owners = owners

    @property
    def num_blocks(self) -> int:
        """The number of blocks that cannot be evicted because of pins."""
        return self._pins.num_blocks

    # Pins.

    def pin(self, node: Node) -> bool:
        """Pins a node until the pin is lifted. Returns False, with nothing changed, for the root, a dropped node, or
        beyond the limit."""
        if node.parent is None or node in self._owners.protection.doomed:
            return False
        if (pin := self._pins.get(node)) is not None and not pin.ttl_ms:
            return True
        num_new = sum(len(one.block_ids) for one in _path(node) if not self._pins.covers(one))
        if self.num_blocks + num_new > self.pin_limit:
            return False
        self._set(node, Pin(0, 0))
        return True

    def pin_for(self, node: Node, num_blocks: int, ttl_ms: int) -> int:
        """Pins the first `num_blocks` of the path that ends with `node`, or as many of them as the budget allows.
        Returns the number of blocks of the path that are pinned now. O(nodes on the path); it splits one edge at
        most."""
        if node in self._owners.protection.doomed or ttl_ms <= 0:
            return 0
        depth, last, budget = 0, None, self._budget(node.tenant)
        for one in _path(node):
            length = min(len(one.block_ids), num_blocks - depth)
            if not self._pins.covers(one):
                length = min(length, budget)
                budget -= length
            if length == 0:
                break
            depth += length
            last = self._owners.end_at(one, length)
            if last is not one:
                break
        if last is not None:
            self._keep(last, ttl_ms)
        return depth

    def _budget(self, tenant: str) -> int:
        mine = self.tenant_limit - self._owners.usage.num_pinned(tenant)
        return max(0, min(mine, self.passing_limit - self.num_blocks))

    def _keep(self, node: Node, ttl_ms: int) -> None:
        pin = self._pins.get(node)
        if pin is not None and not pin.ttl_ms:
            return  # it has a pin without an end already
        now = self._owners.usage.now_ms()
        if pin is not None:
            pin.ttl_ms, pin.expires_ms = ttl_ms, max(pin.expires_ms, now + ttl_ms)
            return
        pin = Pin(ttl_ms, now + ttl_ms)
        self._set(node, pin)
        self._await_end(node, pin)

    def refresh(self, node: Node | None) -> None:
        """Restarts the pins that expire on the way to the root, as they were hit. O(pinned nodes on the path)."""
        if not self._pins:
            return
        while node is not None:
            if (pin := self._pins.get(node)) is not None and pin.ttl_ms:
                pin.expires_ms = self._owners.usage.now_ms() + pin.ttl_ms
            node = node.parent

    def expire(self) -> None:
        """Lifts the pins that are due. O(log pins) each."""
        if not self._due:
            return
        now = self._owners.usage.now_ms()
        while self._due and self._due[0][0] <= now:
            *_, node, pin = heapq.heappop(self._due)
            if self._pins.get(node) is not pin or not pin.ttl_ms:
                continue  # it was lifted meanwhile, or has no end by now
            if pin.expires_ms > now:
                self._await_end(node, pin)
            else:
                self._lift([node], lapsed=True)

    def _await_end(self, node: Node, pin: Pin) -> None:
        # Numbered: a node that is pinned anew has its lifted pin in the queue still, perhaps with the same end.
        heapq.heappush(self._due, (pin.expires_ms, node.id, next(self._numbers), node, pin))

    def unpin(self, region: bytes) -> int:
        nodes = [node for node in self._pins.pinned() if node.region == region]
        self._lift(nodes)
        return len(nodes)

    def _set(self, node: Node, pin: Pin) -> None:
        if self._pins.pin(node, pin):
            self._owners.protection.protect(node)

    def _lift(self, nodes: Iterable[Node], *, lapsed: bool = False) -> None:
        # They are lifted by id and not in a set's order: equal runs evict equally.
        for node in sorted(nodes, key=lambda node: node.id):
            self._pins.lift(node, lapsed=lapsed)
            self._owners.unprotect(node)

    # Drops.

    def drop(self, wanted: Callable[[Node], bool]) -> int:
        """Drops the wanted nodes (of one region, or of one tenant) and everything below them. Returns the number of
        blocks that became free at once."""
        owners = self._owners
        before = owners.pool.num_free
        tops = [
            node for node in owners.tree.nodes() if node.parent is not None and wanted(node) and not wanted(node.parent)
        ]
        for top in tops:
            held = owners.doom(top)
            self._lift([node for node in held if node in self._pins])
        return owners.pool.num_free - before


def _path(node: Node) -> Sequence[Node]:
    """Returns the nodes from below the root down to the node."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]
