"""The shared tier as the engine thread sees it. It decides what of a new prompt to ask a store for, and which of the
host's blocks to write there.

Groups of tokens are copied between the store and the host tier, and from there the usual way. Nothing is copied to the
device without the host. Names are chained keyed hashes that contain the KV identity, the region and every token in the
group and before it. So a worker can find only what the namespace of its own request lets it read. This module decides;
the thread of the store (`StoreThread`) waits for the store.
"""

from __future__ import annotations

import contextlib
import queue
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from cache.host.tiers import HostBlock, HostTier, Written
from cache.prefix_cache import PrefixCache
from cache.tree.hashing import group_hashes, store_tag
from cache.tree.namespaces import NamespacePath, PathEntry, segments
from workers.engine.queueing.forecast import Forecast
from workers.engine.sequences.sequence import Attempt
from workers.engine.tiers.shared_cache.store_thread import Done, Drop, Group, Read, StoreThread, Write
from workers.engine.values.host_port import HostBlocks
from workers.engine.values.record import Rate

READ_GROUPS = 16
"""Largest number of groups that are asked for at a time. It bounds the bytes between the store and the host."""
TAKEN_BYTES = 16 << 20
"""Bytes of received KV that are taken into the host in one step, plus the rest of a group. The engine thread copies
them, and everybody's tokens wait for that."""
UNTAKEN_BYTES = 64 * TAKEN_BYTES
"""Bytes of KV that may be asked for and not taken in yet. Steps would not take in more within `WAIT_S`."""
WAIT_S = 2.0
"""Longest time in seconds that an attempt waits for the store. Later results are for the next attempt."""
MAX_SENT = 1 << 16
"""Number of names that are remembered, so that this worker does not write a group twice."""
TRY_AGAIN = 32
"""A store that was measured to be slower than computing is asked once in this number of times."""


@dataclass(slots=True)
class _Fetch:
    attempt: Attempt
    tokens: Sequence[int]
    groups: list[tuple[bytes, int]]
    """Groups that are still missing, as (name, end)."""
    start: int
    """Position at which the first missing group begins."""
    deadline: float
    generation: int
    waited_for: bool = True
    before: HostBlock | None = None
    """The host's copy of the last block before the first missing group, if it was found already."""


@dataclass(slots=True)
class _Arrival:
    """The result of a read, which is taken in one group at a time."""

    read: Read
    fetch: _Fetch
    done: Done
    num_groups: int = 0
    num_blocks: int = 0
    """Number of blocks taken in up to now."""


class SharedTier:
    def __init__(
        self,
        store_thread: StoreThread,
        cache: PrefixCache,
        mover: HostBlocks,
        secret: bytes,
        identity: bytes,
        prefill: Forecast,
    ) -> None:
        assert cache.host is not None
        self.store_thread = store_thread
        self.rate = Rate()
        """Blocks per second that reads bring."""
        self.num_skipped = self.num_taken = 0
        """Numbers of reads that were not asked for, and of blocks that came."""
        self._cache, self._mover = cache, mover
        self._host: HostTier = cache.host
        self._secret, self._identity = secret, identity
        self._prefill = prefill
        self._fetches: dict[Read, _Fetch] = {}
        self._pinned: dict[Write, Sequence[HostBlock]] = {}
        self._heard: list[Done] = []
        self._arrived: deque[_Arrival] = deque()
        self._sent: OrderedDict[bytes, None] = OrderedDict()
        self._generation = 0
        """Number of drops up to now. A result that was asked for before a drop is not taken in after it."""

    @property
    def num_waiting(self) -> int:
        return sum(fetch.waited_for for fetch in self._fetches.values())

    # --- reading ---

    def ask(self, attempt: Attempt, now: float) -> bool:
        """Asks the store for the rest of the attempt's prompt. Returns whether the attempt is to wait until `take`
        returns it."""
        message, tokens = attempt.message, attempt.sequences[0].tokens
        if not message.cache_read or message.prompt_logprobs >= 0:
            return False
        groups = [g for g in self._groups(attempt.path, tokens) if g[1] < len(tokens)]
        here = self._num_here(attempt.path, tokens)
        first = sum(end <= here for _, end in groups)
        if first == len(groups) or not self._worth():
            return False
        start = groups[first - 1][1] if first else 0
        limit = now + WAIT_S
        return self._read(_Fetch(attempt, tokens, groups[first:], start, limit, self._generation))

    def take(self, now: float) -> list[Attempt]:
        """Takes in what the store's thread brought. Returns the attempts that need not wait any more."""
        ready: list[Attempt] = []
        heard, self._heard = self._heard, []
        while not self.store_thread.results.empty():
            heard.append(self.store_thread.results.get_nowait())
        for done in heard:
            if isinstance(done.job, Write):
                self._host.unpin(self._pinned.pop(done.job))
            else:
                self._arrived.append(_Arrival(done.job, self._fetches[done.job], done))
        room = max(1, TAKEN_BYTES // self._mover.bytes_per_slot)
        while self._arrived and room > 0:
            arrival = self._arrived[0]
            if num_blocks := self._take_group(arrival):
                room -= num_blocks
                continue
            self._arrived.popleft()
            fetch = self._fetches.pop(arrival.read)
            if not self._reads_on(arrival) and fetch.waited_for:
                ready.append(fetch.attempt)
        for fetch in self._fetches.values():
            if fetch.waited_for and now >= fetch.deadline:
                fetch.waited_for = False
                ready.append(fetch.attempt)
        return ready

    def wait(self, seconds: float) -> None:
        """Waits for the store's thread, because there is nothing else to do."""
        if self._arrived:
            return
        with contextlib.suppress(queue.Empty):
            self._heard.append(self.store_thread.results.get(timeout=seconds))

    def _num_here(self, path: NamespacePath, tokens: Sequence[int]) -> int:
        size = self._cache.block_size
        limit = (len(tokens) - 1) // size
        in_host = len(self._host.match(segments(path, size), tokens, 0, limit))
        return max(self._cache.match(path, tokens), in_host * size)

    def _worth(self) -> bool:
        size, prefill = self._cache.block_size, self._prefill.per_second
        if not prefill or not self.rate.per_second or self.rate.per_second * size > prefill:
            return True
        self.num_skipped += 1
        return self.num_skipped % TRY_AGAIN == 0

    def _read(self, fetch: _Fetch) -> bool:
        start, size, groups, counts = fetch.start, self._cache.block_size, [], []
        for name, end in fetch.groups[:READ_GROUPS]:
            region = _region_at(fetch.attempt.path, start, size)
            groups.append(Group(self._tag(region), name.hex(), fetch.tokens[start:end]))
            counts.append((end - start) // size * self._mover.bytes_per_slot)
            start = end
        read = Read(groups, counts)
        num_untaken = sum(sum(one.num_bytes) for one in self._fetches)
        if num_untaken and num_untaken + sum(counts) > UNTAKEN_BYTES:
            self.store_thread.counts.num_dropped += 1
            return False
        if not self.store_thread.ask(read):
            return False
        self._fetches[read] = fetch
        return True

    def _take_group(self, arrival: _Arrival) -> int:
        """Takes in the next group and returns its number of blocks. Returns 0 if there is no further group, or if the
        rest is abandoned."""
        fetch, found = arrival.fetch, arrival.done.found
        if fetch.generation != self._generation or arrival.num_groups == len(found):
            return 0
        name, end = fetch.groups[0]
        if not self._adopt(fetch, fetch.start, end, found[arrival.num_groups]):
            return 0
        self._remember(name)
        num_blocks = (end - fetch.start) // self._cache.block_size
        arrival.num_groups += 1
        arrival.num_blocks += num_blocks
        self.num_taken += num_blocks
        fetch.start, fetch.groups = end, fetch.groups[1:]
        return num_blocks

    def _reads_on(self, arrival: _Arrival) -> bool:
        """Returns whether another read for the same attempt was sent."""
        fetch, done = arrival.fetch, arrival.done
        if fetch.generation != self._generation or arrival.num_groups < len(done.found):
            return False
        if done.found and done.seconds > 0:
            self.rate.add(arrival.num_blocks, done.seconds)
        whole = len(done.found) == READ_GROUPS
        return bool(whole and fetch.groups) and self._read(fetch)

    def _adopt(self, fetch: _Fetch, start: int, end: int, kv: memoryview) -> bool:
        attempt, size = fetch.attempt, self._cache.block_size
        before = fetch.before
        if before is None or before.gone:
            before = self._before(attempt, fetch.tokens, start // size)
        if before is None:
            return False
        path = attempt.path
        region = _region_at(path, start, size)
        # The reader does not own a public prompt: it must not be deleted with the reader.
        public = len(path) > 1 and region == path[0].region
        owner = "" if public else attempt.message.tenant
        tokens, width = fetch.tokens[start:end], self._mover.bytes_per_slot
        for block, copy in self._host.adopt(before, region, tokens, owner):
            self._mover.write(copy.slot, kv[block * width : (block + 1) * width])
        fetch.before = self._host.follow(before, region, tokens)
        return True

    def _before(self, attempt: Attempt, tokens: Sequence[int], num_blocks: int) -> HostBlock | None:
        """Returns the host's copy of the last of the first `num_blocks` blocks. Blocks that only the device has are
        offered to the host first."""
        path = segments(attempt.path, self._cache.block_size)
        for _ in range(2):
            copies = self._host.match(path, tokens, 0, num_blocks)
            if len(copies) == num_blocks:
                return copies[-1] if copies else self._host.root
            self._cache.offer(attempt.path, tokens)
        return None

    # --- writing ---

    def offer(self, written: Iterable[Written]) -> None:
        """Sends the groups to the store that the host's new copies complete."""
        copies = [one.copy for one in written if not one.copy.gone]
        parents = {copy.parent for copy in copies}
        for copy in copies:
            if copy not in parents:
                self._offer(_lineage(copy))

    def _offer(self, copies: list[HostBlock]) -> None:
        tokens = array("i")
        for copy in copies:
            tokens.frombytes(copy.key[1])
        size, start = self._cache.block_size, 0
        for name, end in self._groups(_path_of(copies, size), tokens):
            group, start = copies[start // size : end // size], end
            if name not in self._sent and self._write(name, group):
                self._remember(name)

    def _write(self, name: bytes, copies: list[HostBlock]) -> bool:
        tokens = array("i")
        for copy in copies:
            tokens.frombytes(copy.key[1])
        slots, read = [copy.slot for copy in copies], self._mover.read
        write = Write(
            self._owner(copies[-1].tenant),
            Group(self._tag(copies[-1].key[0]), name.hex(), tokens),
            lambda: b"".join(read(slot) for slot in slots),
        )
        if not self.store_thread.ask(write):
            return False
        self._host.pin(copies)
        self._pinned[write] = copies
        return True

    def _remember(self, name: bytes) -> None:
        self._sent[name] = None
        if len(self._sent) > MAX_SENT:
            self._sent.popitem(last=False)

    # --- dropping ---

    def purge(self, tenant: str) -> None:
        self._generation += 1
        self._sent.clear()
        self.store_thread.drop(Drop(self._owner(tenant)))

    def close(self) -> None:
        """Ends the store's thread, because the process ends."""
        self.store_thread.close()

    # --- names ---

    def _groups(self, path: NamespacePath, tokens: Sequence[int]) -> list[tuple[bytes, int]]:
        entries = [(entry.region, entry.end) for entry in path]
        size = self._cache.block_size
        return group_hashes(self._secret, self._identity, entries, tokens, block_size=size)

    def _tag(self, region: bytes) -> str:
        return store_tag(self._secret, b"region", region)

    def _owner(self, tenant: str) -> str:
        return store_tag(self._secret, b"owner", tenant.encode())


def _lineage(copy: HostBlock) -> list[HostBlock]:
    """Returns the copies from the first block to this one."""
    found: list[HostBlock] = []
    one: HostBlock | None = copy
    while one is not None and one.parent is not None:
        found.append(one)
        one = one.parent
    return found[::-1]


def _path_of(copies: list[HostBlock], size: int) -> NamespacePath:
    entries, end = [], 0
    for region, run in groupby(copies, key=lambda copy: copy.key[0]):
        end += len(list(run)) * size
        entries.append(PathEntry(region, end))
    return (*entries[:-1], PathEntry(entries[-1].region, -1))


def _region_at(path: NamespacePath, position: int, size: int) -> bytes:
    return next(e.region for e in path if e.end == -1 or position < e.end // size * size)
