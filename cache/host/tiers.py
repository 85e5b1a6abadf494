"""The host tier: which blocks of which prefixes have a copy in which slot of host memory, and which copy goes next.

It is a trie of whole blocks, keyed like the prefix tree by (region, tokens of the block): a match is the same prefix,
token for token, and no hash decides. A copy never exists without those of all blocks before it. The module knows slots
as integers; it knows neither bytes, nor the device, nor when a transfer is done. The mover of bytes keeps the order in
which it is told to copy.

Each tenant evicts its own coldest copy once it has its quota, or more slots than any other; else the tenant with the
most slots gives one up. A flood therefore ends when its tenant has as much as the next one. A copy that gets no slot is
refused and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cache.host.tier_owners import UNLIMITED, Owner, Owners
from cache.tree.namespaces import Segment
from cache.tree.radix import ChildKey, Node, token_slice

NO_SLOT = -1


class HostBlock:
    """The copy of one block of one prefix."""

    __slots__ = ("children", "gone", "key", "num_pins", "parent", "queued", "slot", "tenant", "used")

    def __init__(self, parent: HostBlock | None, key: ChildKey, slot: int, tenant: str) -> None:
        self.parent = parent
        self.key = key
        self.slot = slot
        self.tenant = tenant
        self.children: dict[ChildKey, HostBlock] = {}
        self.num_pins = 0
        """The number of readers of the slot. The slot is not reused before they have finished."""
        self.gone = False
        """The copy was dropped while somebody read it. Nobody finds it any more, and its slot becomes free with its
        last reader."""
        self.used = 0
        """A number that grows from use to use. On a path the first block has the largest."""
        self.queued = False
        """True while the copy is in its owner's queue of copies that may go."""

    @property
    def is_free_to_go(self) -> bool:
        """True if no copy follows it and nobody reads it."""
        return not self.children and not self.num_pins


class Written(NamedTuple):
    """A block that has to be copied to a slot."""

    block: int
    copy: HostBlock


@dataclass(slots=True)
class TierCounts:
    """Numbers of blocks since the process began."""

    num_hits: int = 0
    num_written: int = 0
    num_refused: int = 0
    num_evicted: int = 0
    num_swapped: int = 0


class HostTier:
    def __init__(self, num_slots: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.block_size = block_size
        self.counts = TierCounts()
        self.root = HostBlock(None, (b"", b""), NO_SLOT, "")
        self._free = list(range(num_slots - 1, -1, -1))
        self._owners = Owners()
        self._gone: set[HostBlock] = set()
        self._swapped: dict[int, str] = {}
        self._num_uses = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def num_of(self, tenant: str) -> int:
        """Returns the number of slots of a tenant. O(1)."""
        return self._owners.of(tenant).num_slots

    def set_quota(self, tenant: str, num_slots: int | None) -> None:
        """Sets the most slots of a tenant. Slots beyond it are reused when the tenant writes next."""
        self._owners.set_quota(tenant, UNLIMITED if num_slots is None else num_slots)

    # --- matching ---

    def match(self, path: tuple[Segment, ...], tokens: Sequence[int], start: int, limit: int) -> list[HostBlock]:
        """Returns the copies of the blocks from `start` up to at most `limit`, as far as they exist. O(limit) lookups;
        it changes nothing."""
        found: list[HostBlock] = []
        copy, depth = self.root, 0
        for segment in path:
            while depth < min(segment.end, limit):
                child = copy.children.get(self._key(segment.region, tokens, depth))
                if child is None:
                    return found
                copy, depth = child, depth + 1
                if depth > start:
                    found.append(copy)
        return found

    def follow(self, copy: HostBlock, region: bytes, tokens: Sequence[int]) -> HostBlock | None:
        """Returns the copy of the last block of these tokens, which follow `copy`, or None if one is missing.
        O(blocks); it changes nothing."""
        found: HostBlock | None = copy
        for block in range(len(tokens) // self.block_size):
            if found is None:
                break
            found = found.children.get(self._key(region, tokens, block))
        return found

    def pin(self, copies: Iterable[HostBlock]) -> None:
        """Marks copies that somebody begins to read."""
        for copy in copies:
            copy.num_pins += 1

    def unpin(self, copies: Iterable[HostBlock]) -> None:
        """Marks copies that a reader has finished with."""
        for copy in copies:
            assert copy.num_pins, "nobody reads it"
            copy.num_pins -= 1
            if copy.gone and not copy.num_pins:
                self._gone.remove(copy)
                self._free.append(copy.slot)
            self._queue(copy)

    def hit(self, copies: Sequence[HostBlock]) -> None:
        """Notes that copies were used. They are blocks of one path in order."""
        self.counts.num_hits += len(copies)
        if copies:
            self._touch(copies[-1])

    # --- writing ---

    def write(self, nodes: Sequence[Node]) -> list[Written]:
        """Makes copies of all blocks of the path of tree nodes, from below the root. Returns those that did not exist.
        It ends where a slot is refused. O(blocks of the path)."""
        blocks = (
            (self._key(node.region, node.tokens, i), node.tenant, block)
            for node in nodes
            for i, block in enumerate(node.block_ids)
        )
        return self._extend(self.root, blocks)

    def adopt(self, parent: HostBlock, region: bytes, tokens: Sequence[int], tenant: str) -> list[Written]:
        """Makes copies of blocks that came from elsewhere, after `parent`. `Written.block` is the index of the block in
        `tokens`. Existing copies are not written again."""
        blocks = ((self._key(region, tokens, i), tenant, i) for i in range(len(tokens) // self.block_size))
        return [] if parent.gone else self._extend(parent, blocks)

    def _extend(self, copy: HostBlock, blocks: Iterable[tuple[ChildKey, str, int]]) -> list[Written]:
        written: list[Written] = []
        for key, tenant, block in blocks:
            child = copy.children.get(key)
            if child is None:
                copy.num_pins += 1  # otherwise its child could take its slot
                slot = self._take_slot(tenant)
                copy.num_pins -= 1
                if slot is None:
                    self._queue(copy)
                    break
                child = copy.children[key] = HostBlock(copy, key, slot, tenant)
                child.used = self._next_use()
                self._owners.add(tenant, copies=1)
                self._queue(child)
                self.counts.num_written += 1
                written.append(Written(block, child))
            copy = child
        self._touch(copy)
        return written

    def reserve(self, tenant: str, num_slots: int) -> list[int] | None:
        """Returns slots for the blocks of a preempted sequence, until `give_back`. Returns None if there are too few;
        then none is taken."""
        slots: list[int] = []
        while len(slots) < num_slots:
            slot = self._take_slot(tenant)
            if slot is None:
                self.give_back(slots)
                return None
            self._swapped[slot] = tenant
            self._owners.add(tenant, swapped=1)
            slots.append(slot)
        self.counts.num_swapped += num_slots
        return slots

    def give_back(self, slots: Iterable[int]) -> None:
        for slot in slots:
            self._owners.add(self._swapped.pop(slot), swapped=-1)
            self._free.append(slot)

    # --- dropping ---

    def drop(self, region: bytes) -> int:
        """Forgets a region and everything below it. Returns the number of copies that went. O(copies)."""
        return self._drop(lambda copy: copy.key[0].startswith(region))

    def purge(self, tenant: str) -> int:
        """Forgets everything that a tenant wrote and everything below it. The slots of its preempted sequences go with
        those."""
        return self._drop(lambda copy: copy.tenant == tenant)

    def lose(self, copies: Iterable[HostBlock]) -> None:
        """Removes copies whose bytes never arrived."""
        for copy in copies:
            if not copy.gone and copy.parent is not None:
                self._unlink(copy)

    def _drop(self, wanted: Callable[[HostBlock], bool]) -> int:
        tops = [copy for copy in self.copies() if wanted(copy) and copy.parent is not None and not wanted(copy.parent)]
        return sum(self._unlink(top) for top in tops)

    def _unlink(self, top: HostBlock) -> int:
        assert top.parent is not None
        del top.parent.children[top.key]
        self._queue(top.parent)
        below = list(self.copies(top))
        for copy in below:
            self._owners.add(copy.tenant, copies=-1)
            copy.parent = None
            copy.children = {}
            copy.gone = True
            if copy.num_pins:
                self._gone.add(copy)
            else:
                self._free.append(copy.slot)
        return len(below)

    # --- slots ---

    def _take_slot(self, tenant: str) -> int | None:
        """Returns a slot, or None if it is refused. O(log tenants + log copies), amortised."""
        mine = self._owners.of(tenant)
        if mine.num_slots >= mine.quota:
            slot = self._reuse(mine)
        elif self._free:
            return self._free.pop()
        else:
            largest = self._owners.largest()
            slot = None
            if largest.num_slots > mine.num_slots + 1:
                slot = self._reuse(largest)
            if slot is None:
                slot = self._reuse(mine)
        if slot is None:
            self.counts.num_refused += 1
        return slot

    def _reuse(self, owner: Owner) -> int | None:
        """Returns the slot of its coldest copy that no copy follows and nobody reads, or None."""
        copy = owner.coldest()
        if copy is None:
            return None
        self._unlink(copy)
        self.counts.num_evicted += 1
        return self._free.pop()

    def _touch(self, copy: HostBlock) -> None:
        # It goes from the end up: a copy that follows another is never younger.
        one: HostBlock | None = copy
        while one is not None and one.parent is not None:
            one.used = self._next_use()
            one = one.parent

    def _next_use(self) -> int:
        self._num_uses += 1
        return self._num_uses

    def _queue(self, copy: HostBlock) -> None:
        """Queues a copy that may have become free to go. This is called wherever that can happen."""
        if copy.parent is not None and copy.is_free_to_go:
            self._owners.of(copy.tenant).queue(copy)

    def _key(self, region: bytes, tokens: Sequence[int], block: int) -> ChildKey:
        size = self.block_size
        return region, token_slice(tokens, block * size, (block + 1) * size).tobytes()

    # --- for invariants.py ---

    def copies(self, top: HostBlock | None = None) -> Iterator[HostBlock]:
        """Yields `top` and everything below it; without `top`, all copies but the root."""
        stack = [top] if top is not None else list(self.root.children.values())
        while stack:
            copy = stack.pop()
            yield copy
            stack.extend(copy.children.values())

    def broken(self) -> Iterator[str]:
        """Checks law 11: each slot is in one place, each copy follows its parent and is counted, none is younger than
        its parent."""
        places = Counter([*self._free, *self._swapped])
        places.update(copy.slot for copy in self._gone)
        found = Counter[str]()
        for copy in self.copies():
            places[copy.slot] += 1
            found[copy.tenant] += 1
            if copy.gone or copy.parent is None or copy.parent.children.get(copy.key) is not copy:
                yield f"(11) the copy in slot {copy.slot} hangs in the wrong place"
            if copy.is_free_to_go and not copy.queued:
                yield f"(11) the copy in slot {copy.slot} has no place in the order of use"
            if any(child.used > copy.used for child in copy.children.values()):
                yield f"(11) slot {copy.slot} comes too early in the order of use"
        if places != Counter(range(self.num_slots)):
            yield f"(11) slots are not in one place each: {places}"
        yield from self._owners.broken(found, Counter(self._swapped.values()))
        for copy in self._gone:
            if not copy.num_pins or not copy.gone:
                yield f"(11) slot {copy.slot} waits for readers that it does not have"
