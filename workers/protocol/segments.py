"""The files of a journal, the gateway's or the engine's: one owner appends, a crash is repaired, old files go.

A journal is a directory of segments. Each segment begins with a HEADER, then with what its journal takes over from the
segment before, then with the record that ends this beginning. So a segment whose beginning is whole can be read alone.
The module knows bytes and records, not what their payloads mean. Calls block, so callers bring a thread that may wait.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import msgspec

from workers.protocol.ballast import BALLAST_BYTES, Ballast, is_full
from workers.protocol.journal import Chain, Kind, Record, Scan, SegmentHeader, parse_segment_name, scan, segment_name

log = logging.getLogger(__name__)

KEEP_S = 7 * 24 * 3600.0
SMALLEST_RECORD_BYTES = 26
_ENDS_OF_BEGINNINGS = (Kind.SEAL, Kind.ACKED)
"""The kinds of record that end the beginning of a gateway's and of an engine's segment. Later they may stand again."""
SET_ASIDE = ".quarantined"
"""The ending of the name of a damaged segment that was set aside."""


class SlotTaken(Exception):
    """Another process owns this journal."""


@dataclass(frozen=True)
class Segment:
    first_seq: int
    path: Path

    @property
    def set_aside(self) -> Path:
        """The name that the damaged file gets if this segment is damaged."""
        return self.path.with_name(self.path.name + SET_ASIDE)


@dataclass(frozen=True)
class Left:
    """The state that a process left."""

    chain: Chain
    """How the next record must look. After damage, its number is beyond all that the damaged part may have used."""
    boot: int
    records: list[Record]
    """Every record since the last beginning that is whole."""
    is_damaged: bool
    """Records of these segments are missing."""


class Log:
    """A journal that this process owns. One thread at a time calls it, and `begin` comes first."""

    def __init__(
        self,
        directory: Path,
        lock: int,
        chain: Chain,
        *,
        ballast_bytes: int = BALLAST_BYTES,
        spends_ballast: bool = False,
        sync: Callable[[int], None] | None = None,
    ) -> None:
        self.directory = directory
        self.lock = lock
        self.chain = chain
        self.ballast = Ballast(directory, ballast_bytes)
        self.file = -1
        self.num_bytes = 0
        """The size of the segment that is being written."""
        self._spends_ballast = spends_ballast
        self._sync = sync

    def begin(self, beginning: Iterable[tuple[Kind, bytes]]) -> None:
        """Begins a new segment with these records. Raises `OSError`, and leaves no segment that was only begun."""
        self.close_segment()
        path = self.directory / segment_name(self.chain.next_seq)
        data = b"".join(self.chain.encode(kind, payload) for kind, payload in beginning)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.file, self.num_bytes = self._in_ballast(partial(os.open, path, flags, 0o600)), 0
        try:
            self.write(data)
            if self._sync is not None:
                self._sync(self.file)
            sync_directory(self.directory)
        except OSError:
            self.close_segment()
            path.unlink(missing_ok=True)  # all of its content is elsewhere too
            raise

    def write(self, data: bytes) -> None:
        """Writes all of `data`. Raises `OSError`; a part of it may be written then."""
        view = memoryview(data)
        while view:
            num_written = self._in_ballast(partial(os.write, self.file, view))
            self.num_bytes += num_written
            view = view[num_written:]

    def close_segment(self) -> None:
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)

    def close(self) -> None:
        """Frees the slot."""
        self.close_segment()
        os.close(self.lock)

    def _in_ballast(self, call: Callable[[], int]) -> int:
        """Makes a call, in the space of the ballast if there is no other and the journal may use that."""
        try:
            return call()
        except OSError as failure:
            if not (self._spends_ballast and self.ballast.is_held and is_full(failure)):
                raise
        log.error("the disk is full: what runs may end, nothing more is let in", extra={"event": "journal_disk_full"})
        self.ballast.give_up()
        return call()


def take_slot(directory: Path) -> int:
    """Makes the directory and locks it for the life of this process. Raises `SlotTaken`, `OSError`."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise SlotTaken(f"another process owns {directory}") from None
    return lock


def list_segments(directory: Path) -> list[Segment]:
    found = [
        Segment(first_seq, path)
        for path in directory.iterdir()
        if (first_seq := parse_segment_name(path.name)) is not None
    ]
    return sorted(found, key=lambda segment: segment.first_seq)


def recover(directory: Path) -> Left:
    """Cuts a torn tail, sets damaged segments aside, and returns the records since the last beginning that is whole."""
    newest: Scan | None = None
    records: list[Record] = []
    for segment in reversed(list_segments(directory)):
        found = _repaired(segment)
        if not found.records:
            # Its process died before any record in it was whole; the next segment takes its name.
            segment.path.unlink()
            continue
        newest = newest or found
        records = found.records + records
        if any(record.kind in _ENDS_OF_BEGINNINGS for record in found.records):
            break
    first_read = records[0].seq if records else 1
    lost = [bound for first_seq, bound in _damaged(directory) if first_seq >= first_read]
    chain = newest.chain() if newest is not None else Chain()
    if max(lost, default=0) > chain.next_seq:
        chain = Chain(max(lost))
    return Left(chain, _boot(newest) if newest is not None else 0, records, is_damaged=bool(lost))


def _repaired(segment: Segment) -> Scan:
    data = segment.path.read_bytes()
    found = scan(data)
    if found.state == "corrupt":
        quarantine(segment, found.num_valid_bytes)
    elif found.num_valid_bytes < len(data):
        with segment.path.open("r+b") as file:
            file.truncate(found.num_valid_bytes)
            os.fsync(file.fileno())
    return found


def _damaged(directory: Path) -> list[tuple[int, int]]:
    """Returns of each damaged segment its first number, and a number beyond all that it may have used: its records are
    at most as many as its bytes allow."""
    return [
        (first_seq, first_seq + path.stat().st_size // SMALLEST_RECORD_BYTES + 1)
        for path in directory.glob(f"*{SET_ASIDE}")
        if (first_seq := parse_segment_name(path.name.removesuffix(SET_ASIDE))) is not None
    ]


def quarantine(segment: Segment, num_valid_bytes: int) -> None:
    """Sets the damaged file aside under another name, with an alarm. Its valid beginning takes its place."""
    log.critical(
        "journal segment %s is damaged before its tail: it is set aside as %s, and its first %d bytes stand",
        segment.path.name,
        segment.set_aside.name,
        num_valid_bytes,
        extra={"event": "journal_quarantined"},
    )
    beginning = segment.path.with_name(segment.path.name + ".partial")
    with segment.path.open("rb") as damaged, beginning.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(damaged.read(num_valid_bytes))
        file.flush()
        os.fsync(file.fileno())
    segment.path.rename(segment.set_aside)
    beginning.rename(segment.path)
    sync_directory(segment.path.parent)


def drop_old(directory: Path, needless_seq: int, now_s: float | None = None, most: int | None = None) -> int:
    """Deletes segments that nobody needs, because all of their records have numbers up to `needless_seq`: a week after
    their last write, or sooner where more than `most` segments stand. Returns the number of deleted segments."""
    now_s = time.time() if now_s is None else now_s
    segments = list_segments(directory)
    for dropped, (segment, successor) in enumerate(pairwise(segments)):
        is_old = now_s - segment.path.stat().st_mtime >= KEEP_S
        is_beyond = most is not None and len(segments) - dropped > most
        if successor.first_seq > needless_seq + 1 or not (is_old or is_beyond):
            return dropped
        segment.path.unlink()
    return max(0, len(segments) - 1)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _boot(found: Scan) -> int:
    first = found.records[0]
    return msgspec.msgpack.decode(first.payload, type=SegmentHeader).boot if first.kind == Kind.HEADER else 0
