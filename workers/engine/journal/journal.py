"""The engine journal: the cost of every attempt, written before a gateway receives it, and kept until SQL has it.

There is one directory per worker slot, held by flock for the life of the process. Each step is one `write` and no sync:
a killed process loses nothing that the kernel took. After a restart every attempt that began and did not end is ended
with its last counts. A segment begins with a checkpoint of all that is still open, so only the last sound segment is
ever replayed.

When the disk is full, the journal gives up its ballast file. Then running attempts may end, and nothing more is let in
until the ballast fits again. If another program takes the ballast's space as well, open attempts are kept in memory
alone, and a checkpoint contains them once there is space. The engine thread owns the journal after `open`. The module
knows attempts and files, but not links and not SQL.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from workers.engine.journal.replay import Begun, Counts, Ended, Totals, recover, segments
from workers.engine.sequences.sequence import Attempt
from workers.engine.values.errors import StartError
from workers.engine.values.record import StepTotals
from workers.protocol.ballast import BALLAST_BYTES, Ballast, is_full
from workers.protocol.journal import SEGMENT_BYTES, Chain, Kind, SegmentHeader, segment_name
from workers.protocol.messages import EngineRecord, TokenUsage

logger = logging.getLogger(__name__)

KEPT_SEGMENTS = 8
KEPT_S = 7 * 24 * 3600.0
CRASH_REASON = "worker_crash"
LOOK_EVERY_S = 1.0
"""Seconds between two checks of a full disk."""
UNWRITTEN = 2**32
"""More record numbers than a process sends in its life while its disk accepts none of them."""


_encode = msgspec.msgpack.Encoder().encode


class EngineJournal:
    def __init__(
        self,
        directory: Path,
        worker: str,
        process: str,
        root: str,
        *,
        ballast_bytes: int = BALLAST_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Opens the journal. Raises `StartError` if another process holds the slot or the directory cannot be
        written."""
        self.directory = directory
        self.worker = worker
        self._root = root
        self._process = process
        self._buffer: list[bytes] = []
        self._file = -1
        self._num_bytes = 0
        self._numbers: dict[int, int] = {}
        self._last_totals: Totals | None = None
        self._ballast = Ballast(directory, ballast_bytes)
        self._is_behind = False
        self._clock = clock
        self._look_at = 0.0
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(f"The journal directory {directory} cannot be used: {error.strerror}.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise StartError(f"Another process holds {directory}: is this slot running already?") from None
        self._state, self._chain, self._boot = recover(directory)
        if self._chain.next_seq > 1 and not self._ballast.was_left:
            # Its disk may have been full. Then record numbers were sent that are in no segment.
            self._chain = Chain(self._chain.next_seq + UNWRITTEN)
        self._next_number = 1
        try:
            self._rotate()
            self._ballast.take()
            self._end_crashed()
        except OSError as error:
            os.close(self._lock)
            raise StartError(f"The journal directory {directory} cannot be written: {error.strerror}.") from None

    @property
    def is_writable(self) -> bool:
        """Whether attempts may be let in, because there will be space for their endings."""
        return self._ballast.is_held and not self._is_behind

    @property
    def unacked(self) -> list[EngineRecord]:
        return list(self._state.unacked.values())

    # --- records of the engine ---

    def begin(self, attempt: Attempt) -> None:
        message = attempt.message
        begun = Begun(
            self._next_number, message.request_id, message.attempt, message.tenant, self._root, message.lease_bound
        )
        self._next_number += 1
        self._numbers[attempt.serial] = begun.number
        self._append(Kind.BEGUN, begun)
        self._state.open[begun.number] = begun

    def count(self, attempts: Iterable[Attempt]) -> None:
        """Records what running attempts have cost up to now."""
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
            totals.num_prefill_tokens, totals.num_cached_tokens, totals.num_output_tokens, totals.num_recomputed
        )
        if now != self._last_totals:
            self._append(Kind.TOTALS, now)
            self._last_totals = now

    def flush(self) -> None:
        """Writes what the step appended, in one write. Raises `OSError` if the disk fails for another reason than being
        full: an engine that cannot record its work must not go on."""
        if not self.is_writable:
            self._look_for_room()
        data = b"".join(self._buffer)
        self._buffer = []
        if not data or self._is_behind:
            return
        try:
            self._write(data)
            if self._num_bytes >= SEGMENT_BYTES:
                self._rotate()
        except OSError as failure:
            self._fall_behind(failure)

    def close(self) -> None:
        self.flush()
        self._close_file()
        self._ballast.give_up()
        os.close(self._lock)

    # --- a full disk ---

    def _look_for_room(self) -> None:
        """Checks the disk each second. This takes a few ms at most."""
        now = self._clock()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        try:
            if self._is_behind:
                self._buffer = []  # the checkpoint has the state after these records
                self._rotate()
                self._is_behind = False
        except OSError as failure:
            self._fall_behind(failure)
        if not self._is_behind and self._ballast.take():
            logger.warning("the journal has room again", extra={"event": "journal_has_room"})

    def _fall_behind(self, failure: OSError) -> None:
        if not is_full(failure):
            raise failure
        if not self._is_behind:
            logger.critical(
                "the disk has no room for the journal, which goes on in memory", extra={"event": "journal_behind"}
            )
        self._is_behind, self._last_totals = True, None
        self._look_at = self._clock() + LOOK_EVERY_S

    def _write(self, data: bytes) -> None:
        """Writes all of `data`, in the ballast's space if there is no other."""
        view = memoryview(data)
        while view:
            try:
                num_written = os.write(self._file, view)
            except OSError as failure:
                self._spend_ballast(failure)
            else:
                self._num_bytes += num_written
                view = view[num_written:]

    def _spend_ballast(self, failure: OSError) -> None:
        """Gives up the ballast. Raises `failure` where that does not help."""
        if not is_full(failure) or not self._ballast.is_held:
            raise failure
        logger.error(
            "the disk is full: what runs may end, nothing more is let in", extra={"event": "journal_disk_full"}
        )
        self._ballast.give_up()
        self._look_at = self._clock() + LOOK_EVERY_S

    # --- segments ---

    def _append(self, kind: Kind, payload: object) -> None:
        self._buffer.append(self._chain.encode(kind, _encode(payload)))

    def _end(self, number: int, record: EngineRecord) -> None:
        self._append(Kind.ENDED, Ended(number, record))
        self._state.open.pop(number, None)
        self._state.counts.pop(number, None)
        self._state.unacked[record.seq] = record

    def _rotate(self) -> None:
        """Begins a new segment with its checkpoint in one write; then old segments may be deleted. Raises `OSError`,
        and leaves no segment that was only begun."""
        assert not self._buffer
        self._close_file()
        path = self.directory / segment_name(self._chain.next_seq)
        data = self._checkpoint()
        try:
            self._file, self._num_bytes = self._open(path), 0
            self._write(data)
            _sync_directory(self.directory)
        except OSError:
            self._close_file()
            path.unlink(missing_ok=True)  # everything in it is elsewhere too
            raise
        self._prune()

    def _checkpoint(self) -> bytes:
        self._append(Kind.HEADER, SegmentHeader(self.worker, self._process, self._boot))
        for record in self._state.unacked.values():
            self._append(Kind.ENDED, Ended(0, record))
        for begun in self._state.open.values():
            self._append(Kind.BEGUN, begun)
        if self._state.counts:
            self._append(Kind.COUNTS, list(self._state.counts.values()))
        self._append(Kind.ACKED, 0)
        data = b"".join(self._buffer)
        self._buffer = []
        return data

    def _open(self, path: Path) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except OSError as failure:
            self._spend_ballast(failure)
            return os.open(path, flags, 0o600)

    def _close_file(self) -> None:
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _prune(self) -> None:
        """Deletes old segments, which the checkpoint made needless. Some stay for a person to read."""
        paths = segments(self.directory)
        for path in paths[:-1]:
            if len(paths) > KEPT_SEGMENTS or path.stat().st_mtime < time.time() - KEPT_S:
                path.unlink()
                paths = paths[1:]

    def _end_crashed(self) -> None:
        """Ends the attempts of the process before this one. Their last counts are their ending."""
        for number, begun in list(self._state.open.items()):
            counts = self._state.counts.get(number)
            usage = TokenUsage()
            bound = begun.lease_bound
            if counts is not None:
                usage = TokenUsage(
                    counts.cache_read, counts.cache_write, counts.uncached, counts.output, 0, counts.recomputed
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


def _sync_directory(directory: Path) -> None:
    file = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
