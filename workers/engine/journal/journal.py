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

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from workers.engine.sequences.sequence import Attempt
from workers.engine.values.errors import CannotStartYet, StartError
from workers.protocol.ballast import BALLAST_BYTES, is_full
from workers.protocol.counts import EngineRecord
from workers.protocol.engine_journal import Begun, Counts, Ended, replay
from workers.protocol.journal import SEGMENT_BYTES, Chain, Kind, Record, SegmentHeader
from workers.protocol.segments import Log, SlotTaken, drop_old, recover, take_slot

logger = logging.getLogger(__name__)

KEPT_SEGMENTS = 8
LOOK_EVERY_S = 1.0
"""Seconds between two checks of a full disk."""
TAKEN_S = 5.0
"""The time for which a start waits for its slot."""
UNWRITTEN = 2**32
"""More record numbers than a process sends in its life while its disk accepts none of them."""


_decode_header = msgspec.msgpack.Decoder(SegmentHeader).decode
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
        """Opens the journal. Raises `StartError` if another process holds the slot, and `CannotStartYet` if the
        directory cannot be written."""
        self.directory = directory
        self.worker = worker
        self._root = root
        self._buffer: list[bytes] = []
        self._numbers: dict[int, int] = {}
        self._is_behind = False
        self._checkpoint_bytes = 0
        self._clock = clock
        self._look_at = 0.0
        try:
            lock = _take_slot(directory)
            left = recover(directory)
        except SlotTaken:
            raise StartError(f"Another process holds {directory}: is this slot running already?") from None
        except OSError as error:
            raise CannotStartYet(f"The journal directory {directory} cannot be used: {error.strerror}.") from None
        self._log = Log(directory, lock, left.chain, ballast_bytes=ballast_bytes, spends_ballast=True)
        self._state = replay(left)
        self.predecessor = _process_of(left.records)
        """The process that wrote here before, if any did."""
        self._header = SegmentHeader(worker, process, left.boot + 1)
        if left.chain.next_seq > 1 and not self._log.ballast.was_left:
            # Its disk may have been full. Then record numbers were sent that are in no segment.
            self._log.chain = Chain(left.chain.next_seq + UNWRITTEN)
        self._next_number = 1
        try:
            self._rotate()
            self._log.ballast.take()
            self._end_crashed()
        except OSError as error:
            self._log.close()
            raise CannotStartYet(f"The journal directory {directory} cannot be written: {error.strerror}.") from None

    @property
    def is_writable(self) -> bool:
        """Whether attempts may be let in, because there will be space for their endings."""
        return self._log.ballast.is_held and not self._is_behind

    @property
    def unacked(self) -> list[EngineRecord]:
        return list(self._state.unacked.values())

    # --- records of the engine ---

    def begin(self, attempt: Attempt) -> None:
        message = attempt.message
        begun = Begun(self._next_number, message.request_id, message.attempt, message.tenant, self._root)
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
            self._log.chain.next_seq,
            message.request_id,
            message.attempt,
            message.tenant,
            self._root,
            attempt.usage,
            attempt.end_reason,
        )
        self._end(number, record)
        return record

    def ack(self, seq: int) -> None:
        if self._state.ack(seq):
            self._append(Kind.ACKED, seq)

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
            self._log.write(data)
            if self._log.num_bytes >= max(SEGMENT_BYTES, 2 * self._checkpoint_bytes):
                self._rotate()
        except OSError as failure:
            self._fall_behind(failure)

    def close(self) -> None:
        self.flush()
        self._log.ballast.give_up()
        self._log.close()

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
        if not self._is_behind and self._log.ballast.take():
            logger.warning("the journal has room again", extra={"event": "journal_has_room"})

    def _fall_behind(self, failure: OSError) -> None:
        if not is_full(failure):
            raise failure
        if not self._is_behind:
            logger.critical(
                "the disk has no room for the journal, which goes on in memory", extra={"event": "journal_behind"}
            )
        self._is_behind = True
        self._look_at = self._clock() + LOOK_EVERY_S

    # --- segments ---

    def _append(self, kind: Kind, payload: object) -> None:
        self._buffer.append(self._log.chain.encode(kind, _encode(payload)))

    def _end(self, number: int, record: EngineRecord) -> None:
        self._append(Kind.ENDED, Ended(number, record))
        self._state.open.pop(number, None)
        self._state.counts.pop(number, None)
        self._state.unacked[record.seq] = record

    def _rotate(self) -> None:
        """Begins a new segment with its checkpoint, which makes older segments needless. Some stay for a person to
        read. Raises `OSError`."""
        assert not self._buffer
        first_seq = self._log.chain.next_seq
        self._log.begin(self._checkpoint())
        self._checkpoint_bytes = self._log.num_bytes
        drop_old(self.directory, first_seq - 1, most=KEPT_SEGMENTS)

    def _checkpoint(self) -> Iterator[tuple[Kind, bytes]]:
        yield Kind.HEADER, _encode(self._header)
        for record in self._state.unacked.values():
            yield Kind.ENDED, _encode(Ended(0, record))
        for begun in self._state.open.values():
            yield Kind.BEGUN, _encode(begun)
        if self._state.counts:
            yield Kind.COUNTS, _encode(list(self._state.counts.values()))
        yield Kind.ACKED, _encode(0)

    def _end_crashed(self) -> None:
        """Ends the attempts of the process before this one. Their last counts are their ending."""
        for number in list(self._state.open):
            self._end(number, self._state.crashed(number, self._log.chain.next_seq))
        self.flush()


def _take_slot(directory: Path) -> int:
    """Returns the slot's lock. A replay of the journal may have it for some seconds. Raises SlotTaken, OSError."""
    until = time.monotonic() + TAKEN_S
    while True:
        try:
            return take_slot(directory)
        except SlotTaken:
            if time.monotonic() > until:
                raise
            time.sleep(0.1)


def _process_of(records: Iterable[Record]) -> str:
    """Returns the process that wrote the last header."""
    names = [_decode_header(record.payload).process for record in records if record.kind == Kind.HEADER]
    return names[-1] if names else ""


def _counts(number: int, attempt: Attempt) -> Counts:
    prompt = attempt.account.counts
    return Counts(
        number, prompt.cache_read, prompt.cache_write, prompt.uncached, attempt.num_output, attempt.num_recomputed
    )
