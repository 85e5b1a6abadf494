"""Retention independent of age: pins, with and without an end, priorities of prompts, and drops.

A pin is one more protector on a node, so its whole path stays and no eviction rule needs to know of it. `num_pins`
counts pins up the path as protectors are counted, so that the blocks under pins are known without a walk.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from cache.blocks.ownership import Ownership
from cache.tree.radix import Node

OUTPUT_DISCOUNT = 10
"""The difference between the priority of output and that of the prompt before it: conversations lose answers before
system prompts."""
PASSING_SHARE = 2
"""The divisor for pins that expire: they are set only while all pins together hold less than this part of the pin
limit. The rest is for public prompts."""
TENANT_SHARE = 4
"""The divisor of that part for the pins of one tenant."""


@dataclass(frozen=True, slots=True)
class Range:
    """Prompt tokens from `start` up to `end`, exclusive, and their `priority`. With a `ttl_ms` these tokens, and all
    before them, are pinned for that time after each use."""

    start: int
    end: int
    priority: int
    ttl_ms: int = 0


@dataclass(frozen=True, slots=True)
class Worth:
    """The priorities of the blocks that one sequence commits. If two ranges overlap, the later one counts."""

    block_size: int
    prompt_end: int
    """The end of the prompt in blocks."""
    prompt: int = 50
    output: int | None = None
    """The priority of output. None stands for a little less than the prompt's."""
    ranges: tuple[Range, ...] = ()

    def pieces(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield (end, priority) of each run of equal priority in the blocks [start, end). O(ranges ** 2)."""
        cuts = {edge // self.block_size for r in self.ranges for edge in (r.start, r.end)}
        for cut in sorted(cut for cut in {*cuts, self.prompt_end, end} if start < cut <= end):
            yield cut, self.of_block(cut - 1)

    def of_block(self, block: int) -> int:
        if block >= self.prompt_end:
            return max(0, self.prompt - OUTPUT_DISCOUNT) if self.output is None else self.output
        for one in reversed(self.ranges):
            if one.start // self.block_size <= block < one.end // self.block_size:
                return one.priority
        return self.prompt


@dataclass(slots=True, eq=False)
class Pin:
    ttl_ms: int
    """Milliseconds of the pin after each use. With 0 it stays until it is lifted."""
    expires_ms: int


class Retention:
    def __init__(self, owners: Ownership, pin_limit: int) -> None:
        """`pin_limit` is the number of blocks that all pins together may hold."""
        self.pin_limit = pin_limit
        self.passing_limit = pin_limit // PASSING_SHARE
        self.tenant_limit = self.passing_limit // TENANT_SHARE
        self.num_blocks = 0
        """The number of blocks that cannot be evicted because of pins."""
        self._pins: dict[Node, Pin] = {}
        self._due: list[tuple[int, int, Node, Pin]] = []
        """A heap by expiry with one entry per pin that expires. The entry may be due earlier than the pin itself."""
        self._owners = owners

    # Pins.

    def pin(self, node: Node) -> bool:
        """Pin a node until the pin is lifted. Returns False, with nothing changed, for the root, a dropped node, or
        beyond the limit."""
        if node.parent is None or node.doomed:
            return False
        if (pin := self._pins.get(node)) is not None and not pin.ttl_ms:
            return True
        num_new = sum(len(n.block_ids) for n in _uncovered(node))
        if self.num_blocks + num_new > self.pin_limit:
            return False
        self._set(node, Pin(0, 0))
        return True

    def pin_for(self, node: Node, num_blocks: int, ttl_ms: int) -> int:
        """Pin the first `num_blocks` of the path that ends with `node`, or as many of them as the budget allows.
        Returns the number of blocks of the path that are pinned now. O(nodes on the path); it splits one edge at
        most."""
        if node.doomed or ttl_ms <= 0:
            return 0
        depth, last, budget = 0, None, self._budget(node.tenant)
        for one in _path(node):
            length = min(len(one.block_ids), num_blocks - depth)
            if not one.num_pins:
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
        heapq.heappush(self._due, (pin.expires_ms, node.id, node, pin))

    def refresh(self, node: Node | None) -> None:
        """Restart the pins that expire on the way to the root, as they were hit. O(pinned nodes on the path)."""
        while node is not None:
            if node.pinned and (pin := self._pins[node]).ttl_ms:
                pin.expires_ms = self._owners.usage.now_ms() + pin.ttl_ms
            node = node.parent

    def expire(self) -> None:
        """Lift the pins that are due. O(log pins) each."""
        if not self._due:
            return
        now = self._owners.usage.now_ms()
        while self._due and self._due[0][0] <= now:
            _, _, node, pin = heapq.heappop(self._due)
            if self._pins.get(node) is not pin or not pin.ttl_ms:
                continue  # it was lifted meanwhile, or has no end by now
            if pin.expires_ms > now:
                heapq.heappush(self._due, (pin.expires_ms, node.id, node, pin))
            else:
                self._lift([node], lapsed=True)

    def unpin(self, region: bytes) -> int:
        nodes = [node for node in self._pins if node.region == region]
        self._lift(nodes)
        return len(nodes)

    def _set(self, node: Node, pin: Pin) -> None:
        if not node.pinned:
            node.pinned = True
            self._cover(node)
            self._owners.protection.protect(node)
        self._pins[node] = pin

    def _lift(self, nodes: Iterable[Node], *, lapsed: bool = False) -> None:
        # They are lifted by id and not in a set's order: equal runs evict equally.
        for node in sorted(nodes, key=lambda node: node.id):
            node.pinned = False
            del self._pins[node]
            self._uncover(node, lapsed=lapsed)
            self._owners.unprotect(node)

    # Blocks under pins.

    def _cover(self, node: Node | None) -> None:
        while node is not None:
            node.num_pins += 1
            if node.num_pins > 1:
                return
            node.lapsed = False
            self._count(node, len(node.block_ids))
            node = node.parent

    def _uncover(self, top: Node, *, lapsed: bool) -> None:
        node: Node | None = top
        while node is not None:
            node.num_pins -= 1
            if node.num_pins:
                return
            # The effect of one tenant's pin on public nodes must not show to other tenants.
            node.lapsed = lapsed and node.tenant == top.tenant
            self._count(node, -len(node.block_ids))
            node = node.parent

    def _count(self, node: Node, num_blocks: int) -> None:
        self.num_blocks += num_blocks
        self._owners.usage.pin(node.tenant, num_blocks)

    # Drops.

    def drop(self, wanted: Callable[[Node], bool]) -> int:
        """Drop the wanted nodes (of one region, or of one tenant) and everything below them. Returns the number of
        blocks that became free at once."""
        owners = self._owners
        before = owners.pool.num_free
        tops = [
            node for node in owners.tree.nodes() if node.parent is not None and wanted(node) and not wanted(node.parent)
        ]
        for top in tops:
            held = owners.doom(top)
            self._lift([node for node in held if node.pinned])
        return owners.pool.num_free - before


def _path(node: Node) -> Sequence[Node]:
    """Return the nodes from below the root down to the node."""
    path = []
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


def _uncovered(node: Node) -> Sequence[Node]:
    return [one for one in _path(node) if not one.num_pins]
