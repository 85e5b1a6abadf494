"""Copies of blocks between the device and the host: which of them are worth restoring, which sequences wait for them,
and the blocks that a preempted sequence keeps in the host. The module is pure.

A restore is scheduled like a prefill. One chunk of blocks is copied while steps run, and the sequence is in none of the
steps before its last chunk is there. The measured times of copies and prefills decide whether a restore is worth it.
The module knows sequences, slots and seconds. `host_port` moves the bytes, and the cache knows what can be found.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from cache.host.tiers import HostBlock, HostTier, Written
from cache.prefix_cache import PrefixCache
from cache.tree.handle import Handle
from workers.engine.queueing.forecast import Forecast
from workers.engine.sequences.sequence import Sequence, Swapped
from workers.engine.values.errors import DeviceOutOfMemory
from workers.engine.values.host_port import HostBlocks, Transfer
from workers.engine.values.record import Rate

Preempt = Literal["auto", "recompute", "swap"]

CHUNK_BLOCKS = 64
"""Largest number of blocks of one sequence that are copied at a time."""


@dataclass(frozen=True, slots=True)
class RestoreSource:
    """Blocks that can follow those that the tree matched: slots in order, up to position `num_tokens`."""

    slots: list[int]
    num_tokens: int
    copies: Seq[HostBlock] = ()
    """Pinned copies of the host. There are none if the source is the sequence's own swapped blocks."""


@dataclass(slots=True)
class Restore:
    sequence: Sequence
    source: RestoreSource
    blocks: list[int]
    num_placed: int = 0
    transfer: Transfer | None = None

    @property
    def chunk(self) -> slice:
        return slice(self.num_placed, self.num_placed + CHUNK_BLOCKS)


@dataclass(slots=True)
class RestoreCounts:
    """Numbers of blocks since the process began."""

    num_stored: int = 0
    num_restored: int = 0
    num_swapped_out: int = 0
    num_swapped_in: int = 0
    num_skipped: int = 0
    """Blocks that were found in the host and computed again, because that is faster."""
    num_failed: int = 0


class Pace:
    """Measured speed of copies and prefills."""

    def __init__(self, prefill: Forecast, block_size: int) -> None:
        self.prefill = prefill
        self.load = Rate()
        self.store = Rate()
        self._block_size = block_size

    def worth(self, num_blocks: int, *, both_ways: bool = False) -> bool:
        """Returns whether copies are faster than a prefill. A copy whose speed was never measured is taken to cost
        nothing, so that it is tried."""
        copies = _seconds(num_blocks, self.load.per_second or self.store.per_second)
        if both_ways:
            copies += _seconds(num_blocks, self.store.per_second)
        prefill = self.prefill.per_second
        return not prefill or copies < _seconds(num_blocks * self._block_size, prefill)


def _seconds(number: int, per_second: float) -> float:
    return number / per_second if per_second else 0.0


@dataclass(slots=True)
class _Stores:
    """Copies to the host whose time is not known yet."""

    flying: list[tuple[int, Transfer]] = field(default_factory=list)

    def add(self, num_blocks: int, transfer: Transfer, rate: Rate) -> None:
        self.flying.append((num_blocks, transfer))
        while self.flying and self.flying[0][1].done:
            number, done = self.flying.pop(0)
            _measure(rate, number, done)


class Restores:
    def __init__(self, cache: PrefixCache, mover: HostBlocks, prefill: Forecast, preempt: Preempt = "auto") -> None:
        assert cache.host is not None
        self.counts = RestoreCounts()
        self.pace = Pace(prefill, cache.block_size)
        self._cache = cache
        self._host: HostTier = cache.host
        self._mover = mover
        self._preempt = preempt
        self._open: dict[Sequence, Restore] = {}
        self._stores = _Stores()
        self.on_written: Callable[[Seq[Written]], None] = lambda written: None
        """Callback for copies that the host has now."""

    @property
    def bytes_per_block(self) -> int:
        return self._mover.bytes_per_slot

    @property
    def num_open(self) -> int:
        return len(self._open)

    # --- to the host ---

    def flush(self) -> None:
        """Copies the blocks that the tree offered to the host. The tree may have given them up meanwhile, so this comes
        before anything writes to blocks."""
        offers = self._cache.owners.offers
        written = offers.take() if offers is not None else []
        if not written:
            return
        if not self._store([(one.block, one.copy.slot) for one in written]):
            self._host.lose(one.copy for one in written)
            return
        self.on_written(written)

    def swap_out(self, sequence: Sequence, *, needed: bool) -> bool:
        """Keeps the blocks of a preempted sequence in the host, if that is faster than computing them again. Returns
        whether it does. The sequence is about to lose them. Blocks that another sequence needs are gone next, and so
        are those that were never in the tree; the others stay in the tree."""
        size = self._cache.block_size
        num_blocks = -(-sequence.num_computed // size)
        if sequence.swapped is not None or not num_blocks or not self._swaps(sequence, num_blocks, needed):
            return False
        slots = self._host.reserve(sequence.attempt.message.tenant, num_blocks)
        if slots is None:
            return False
        self.flush()  # pending copies to these slots come first
        if not self._store(list(zip(sequence.block_ids, slots, strict=False))):
            self._host.give_back(slots)
            return False
        self.counts.num_swapped_out += num_blocks
        sequence.swapped = Swapped(slots, sequence.num_computed)
        return True

    def _swaps(self, sequence: Sequence, num_blocks: int, needed: bool) -> bool:
        message = sequence.attempt.message
        if self._preempt == "recompute" or sequence.attempt.wants_prompt_logprobs:
            return False
        if self._preempt == "swap":
            return True
        lost = needed or not message.cache_write or bool(message.adapter)
        return lost and self.pace.worth(num_blocks, both_ways=True)

    def forget(self, sequence: Sequence) -> None:
        """Gives back the host slots of a sequence that ended, or that needs them no more."""
        if sequence.swapped is not None:
            self._host.give_back(sequence.swapped.slots)
            sequence.swapped = None

    # --- from the host ---

    def source(self, sequence: Sequence, handle: Handle, *, read: bool) -> RestoreSource | None:
        """Returns the blocks that the host has after the tree's match, if they are worth restoring. The result is to be
        passed to `begin` or to `leave`."""
        first, swapped = handle.num_tree_blocks, sequence.swapped
        if swapped is not None and len(swapped.slots) > first:
            return RestoreSource(swapped.slots[first:], swapped.num_tokens)
        copies = self._cache.copies(handle, sequence.tokens) if read else []
        if copies:
            self.flush()  # some may have no bytes yet; those that cannot be stored are gone, with all behind them
            copies = [copy for copy in copies if not copy.gone]
        if not copies:
            return None
        if not self.pace.worth(len(copies)):
            self.counts.num_skipped += len(copies)
            handle.miss_reason = "restore_skipped"
            return None
        self._host.pin(copies)
        num_tokens = (first + len(copies)) * self._cache.block_size
        return RestoreSource([copy.slot for copy in copies], num_tokens, copies)

    def leave(self, source: RestoreSource | None) -> None:
        if source is not None:
            self._host.unpin(source.copies)

    def begin(self, sequence: Sequence, source: RestoreSource | None, fresh: Seq[int]) -> None:
        """Starts to restore into the first of these fresh blocks, which belong to the sequence alone."""
        if source is None or source.copies:
            self.forget(sequence)  # the tree has it all
        if source is None:
            return
        restore = Restore(sequence, source, list(fresh[: len(source.slots)]))
        self._cache.begin_move(restore.blocks)
        sequence.restoring = True
        self._open[sequence] = restore
        self._load(restore)

    def poll(self) -> list[tuple[Sequence, bool]]:
        """Handles the chunks that have arrived. Returns the sequences whose restore has ended, each with whether the
        blocks were its own swapped ones; its `num_computed` says how much it has."""
        ready: list[tuple[Sequence, bool]] = []
        if self._open:
            self.flush()
        for restore in list(self._open.values()):
            if restore.transfer is not None and restore.transfer.done:
                self._place(restore)
            if restore.transfer is None:
                ready.append((restore.sequence, restore.sequence.swapped is not None))
                self._close(restore)
        return ready

    def wait(self) -> None:
        """Waits for a copy, because there is nothing to compute before one has arrived."""
        for restore in self._open.values():
            if restore.transfer is not None:
                restore.transfer.wait()
                return

    def cancel(self, sequence: Sequence) -> None:
        """Cancels the restore of a sequence that loses its blocks before they are filled."""
        restore = self._open.pop(sequence, None)
        if restore is None:
            return
        if restore.transfer is not None:
            restore.transfer.wait()  # a slot that is still read must not be written
        sequence.restoring = False
        self._cache.end_move(restore.blocks)
        self._host.unpin(restore.source.copies)

    def _load(self, restore: Restore) -> None:
        """Starts to load the next chunk. Without one, everything is there."""
        slots = restore.source.slots[restore.chunk]
        try:
            restore.transfer = self._mover.load(slots) if slots else None
        except DeviceOutOfMemory:
            self.counts.num_failed += len(slots)
            restore.transfer = None

    def _place(self, restore: Restore) -> None:
        blocks, transfer = restore.blocks[restore.chunk], restore.transfer
        assert transfer is not None
        try:
            self._mover.place(transfer, blocks)
        except DeviceOutOfMemory:
            self.counts.num_failed += len(blocks)
            restore.transfer = None
            return
        _measure(self.pace.load, len(blocks), transfer)
        restore.num_placed += len(blocks)
        self._load(restore)

    def _close(self, restore: Restore) -> None:
        """Ends a restore. The sequence has all its blocks or, if memory ran out, those that were placed."""
        sequence, source, number = restore.sequence, restore.source, restore.num_placed
        del self._open[sequence]
        sequence.restoring = False
        self._cache.end_move(restore.blocks)
        if sequence.swapped is not None:
            self.counts.num_swapped_in += number
            self.forget(sequence)
        else:
            self.counts.num_restored += number
            self._host.hit(source.copies[:number])
            self._host.unpin(source.copies)
        size = self._cache.block_size
        end = sequence.num_computed + number * size
        sequence.num_computed = sequence.num_scheduled = min(end, source.num_tokens)

    def _store(self, pairs: list[tuple[int, int]]) -> bool:
        try:
            transfer = self._mover.store(pairs)
        except DeviceOutOfMemory:
            self.counts.num_failed += len(pairs)
            return False
        self.counts.num_stored += len(pairs)
        self._stores.add(len(pairs), transfer, self.pace.store)
        return True


def _measure(rate: Rate, num_blocks: int, transfer: Transfer) -> None:
    if transfer.seconds > 0:
        rate.add(num_blocks, transfer.seconds)
