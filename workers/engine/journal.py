"""The engine journal: what every attempt cost, written before a gateway hears of it, kept until SQL has it.

One directory per worker slot, held by flock for the life of the process. Each step is one `write` and no sync: a killed
process loses nothing the kernel took. After a restart every attempt that began and did not end is ended from its last
counts. A segment begins with a checkpoint of all that is still open, so that only the last sound one is ever replayed.
Owned by the engine thread after `open`. Knows attempts and files; not links, not SQL.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from workers.engine.errors import StartError
from workers.engine.record import StepTotals
from workers.engine.sequence import Attempt
from workers.protocol.journal import (
    NO_HASH,
    SEGMENT_BYTES,
    Chain,
    Kind,
    Record,
    Scan,
    SegmentHeader,
    parse_segment_name,
    scan,
    segment_name,
)
from workers.protocol.messages import EngineRecord, TokenUsage

logger = logging.getLogger(__name__)

KEPT_SEGMENTS = 8
KEPT_S = 7 * 24 * 3600.0
CRASH_REASON = "worker_crash"


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """An attempt enters; `number` stands for it in the counts."""

    number: int
    request_id: str
    attempt: int
    tenant: str
    root: str
    lease_bound: int


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """Absolute, so the last one stands."""

    number: int
    cache_read: int
    cache_write: int
    uncached: int
    output: int
    recomputed: int
    lease_bound: int


class Ended(msgspec.Struct, frozen=True, array_like=True):
    number: int
    """0 in a checkpoint: nothing of it is open."""
    record: EngineRecord


class Totals(msgspec.Struct, frozen=True):
    """Sums of this process since its start."""

    prefill: int
    cached: int
    output: int
    recomputed: int


_encode = msgspec.msgpack.Encoder().encode
_decode_begun = msgspec.msgpack.Decoder(Begun).decode
_decode_counts = msgspec.msgpack.Decoder(list[Counts]).decode
_decode_ended = msgspec.msgpack.Decoder(Ended).decode
_decode_seq = msgspec.msgpack.Decoder(int).decode


class Replay:
    """What the records of a journal amount to: attempts still open, endings not yet acknowledged. Pure."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.open: dict[int, Begun] = {}
        self.counts: dict[int, Counts] = {}
        self.unacked: dict[int, EngineRecord] = {}
        self.checkpointed = False
        for record in records:
            self.apply(record)

    def apply(self, record: Record) -> None:
        match record.kind:
            case Kind.BEGUN:
                begun = _decode_begun(record.payload)
                self.open[begun.number] = begun
            case Kind.COUNTS:
                self.counts.update((c.number, c) for c in _decode_counts(record.payload))
            case Kind.ENDED:
                ended = _decode_ended(record.payload)
                self.open.pop(ended.number, None)
                self.unacked[ended.record.seq] = ended.record
            case Kind.ACKED:
                self.checkpointed = True
                self.ack(_decode_seq(record.payload))

    def ack(self, seq: int) -> bool:
        """Forgets what is in SQL; True if there was anything."""
        acked = [other for other in self.unacked if other <= seq]
        for other in acked:
            del self.unacked[other]
        return bool(acked)


class EngineJournal:
    def __init__(self, directory: Path, worker: str, process: str, root: str) -> None:
        """Raises `StartError` if another process holds the slot or the directory cannot be written."""
        self.directory = directory
        self.worker = worker
        self._root = root
        self._process = process
        self._buffer: list[bytes] = []
        self._file = -1
        self._num_bytes = 0
        self._numbers: dict[int, int] = {}
        self._last_totals: Totals | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(
                f"The journal directory {directory} cannot be used: {error.strerror}."
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise StartError(
                f"Another process holds {directory}: is this slot running already?"
            ) from None
        self._state, self._chain, self._boot = _recover(directory)
        self._next_number = 1
        self._rotate()
        self._end_crashed()

    @property
    def unacked(self) -> list[EngineRecord]:
        return list(self._state.unacked.values())

    # --- what the engine says ---

    def begin(self, attempt: Attempt) -> None:
        message = attempt.message
        begun = Begun(
            self._next_number,
            message.request_id,
            message.attempt,
            message.tenant,
            self._root,
            message.lease_bound,
        )
        self._next_number += 1
        self._numbers[attempt.serial] = begun.number
        self._append(Kind.BEGUN, begun)
        self._state.open[begun.number] = begun

    def count(self, attempts: Iterable[Attempt]) -> None:
        """What running attempts have cost by now."""
        counts = {}
        for attempt in attempts:
            number = self._numbers.get(attempt.serial)
            if number is not None and number not in counts:
                counts[number] = _counts(number, attempt)
        if counts:
            self._append(Kind.COUNTS, list(counts.values()))
            self._state.counts.update(counts)

    def end(self, attempt: Attempt) -> EngineRecord:
        message = attempt.message
        number = self._numbers.pop(attempt.serial)
        record = EngineRecord(
            self._chain.next_seq,
            message.request_id,
            message.attempt,
            message.tenant,
            self._root,
            attempt.usage,
            attempt.lease.bound,
            attempt.end_reason,
        )
        self._end(number, record)
        return record

    def ack(self, seq: int) -> None:
        if self._state.ack(seq):
            self._append(Kind.ACKED, seq)

    def add_totals(self, totals: StepTotals) -> None:
        now = Totals(
            totals.num_prefill_tokens,
            totals.num_cached_tokens,
            totals.num_output_tokens,
            totals.num_recomputed,
        )
        if now != self._last_totals:
            self._append(Kind.TOTALS, now)
            self._last_totals = now

    def flush(self) -> None:
        """One write of what the step appended. Raises `OSError`: an engine that cannot witness must not go on."""
        if not self._buffer:
            return
        data = b"".join(self._buffer)
        self._buffer = []
        _write_all(self._file, data)
        self._num_bytes += len(data)
        if self._num_bytes >= SEGMENT_BYTES:
            self._rotate()

    def close(self) -> None:
        self.flush()
        os.close(self._file)
        os.close(self._lock)

    # --- segments ---

    def _append(self, kind: Kind, payload: object) -> None:
        self._buffer.append(self._chain.encode(kind, _encode(payload)))

    def _end(self, number: int, record: EngineRecord) -> None:
        self._append(Kind.ENDED, Ended(number, record))
        self._state.open.pop(number, None)
        self._state.counts.pop(number, None)
        self._state.unacked[record.seq] = record

    def _rotate(self) -> None:
        """A new segment with its checkpoint in one write; then old segments may go."""
        if self._file >= 0:
            os.close(self._file)
        assert not self._buffer
        path = self.directory / segment_name(self._chain.next_seq)
        self._file = os.open(
            path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        self._append(Kind.HEADER, SegmentHeader(self.worker, self._process, self._boot))
        for record in self._state.unacked.values():
            self._append(Kind.ENDED, Ended(0, record))
        for begun in self._state.open.values():
            self._append(Kind.BEGUN, begun)
        if self._state.counts:
            self._append(Kind.COUNTS, list(self._state.counts.values()))
        self._append(Kind.ACKED, 0)
        data = b"".join(self._buffer)
        self._buffer, self._num_bytes = [], len(data)
        _write_all(self._file, data)
        _sync_directory(self.directory)
        self._prune()

    def _prune(self) -> None:
        """The checkpoint made older segments needless; some stay for a person to read."""
        paths = _segments(self.directory)
        for path in paths[:-1]:
            if len(paths) > KEPT_SEGMENTS or path.stat().st_mtime < time.time() - KEPT_S:
                path.unlink()
                paths = paths[1:]

    def _end_crashed(self) -> None:
        """Attempts of the process before this one: their last counts are their ending."""
        for number, begun in list(self._state.open.items()):
            counts = self._state.counts.get(number)
            usage = TokenUsage()
            bound = begun.lease_bound
            if counts is not None:
                usage = TokenUsage(
                    counts.cache_read,
                    counts.cache_write,
                    counts.uncached,
                    counts.output,
                    0,
                    counts.recomputed,
                )
                bound = counts.lease_bound
            record = EngineRecord(
                self._chain.next_seq,
                begun.request_id,
                begun.attempt,
                begun.tenant,
                begun.root,
                usage,
                bound,
                CRASH_REASON,
            )
            self._end(number, record)
        self.flush()


def _counts(number: int, attempt: Attempt) -> Counts:
    prompt = attempt.account.counts
    return Counts(
        number,
        prompt.cache_read,
        prompt.cache_write,
        prompt.uncached,
        attempt.num_output,
        attempt.num_recomputed,
        attempt.lease.bound,
    )


def _segments(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if parse_segment_name(p.name) is not None)


def _recover(directory: Path) -> tuple[Replay, Chain, int]:
    """State, chain and boot count after the last sound checkpoint. Damaged segments are set aside, not deleted."""
    state, boot, next_seq = Replay(), 1, 1
    last: Scan | None = None
    paths = _segments(directory)
    for path in reversed(paths):
        found = scan(path.read_bytes())
        next_seq = max(next_seq, _seq_bound(found, path))
        if found.state == "corrupt":
            logger.error(
                "journal segment %s is damaged and set aside",
                path.name,
                extra={"event": "journal_quarantined"},
            )
            path.rename(path.with_suffix(".quarantined"))
        elif not found.records:
            path.unlink()  # killed before anything in it was whole: the next segment takes its name
            continue
        replay = Replay(found.records)
        if found.state == "corrupt":
            # Behind the damage they may have gone on and ended: half a count is no witness.
            replay.open.clear()
            replay.counts.clear()
        if replay.checkpointed:
            state, last = replay, found
            header = msgspec.msgpack.decode(found.records[0].payload, type=SegmentHeader)
            boot = header.boot + 1
            if found.state == "torn":
                os.truncate(path, found.num_valid_bytes)
            break
    prev_hash = last.prev_hash if last is not None and last.next_seq == next_seq else NO_HASH
    return state, Chain(next_seq, prev_hash), boot


def _seq_bound(found: Scan, path: Path) -> int:
    """The next free number; beyond damage as many records may lie as the bytes allow."""
    if found.state != "corrupt":
        return found.next_seq  # what a torn write held was never told to anybody
    smallest_record = 30
    first = parse_segment_name(path.name) or 1
    return max(found.next_seq, first) + path.stat().st_size // smallest_record + 1


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
