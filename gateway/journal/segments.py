"""The files of one slot's journal: list them, read on from a record, recover after a crash, quarantine, drop old ones.

The functions block; callers bring a thread. Knows bytes and records, not what their payloads mean, except for the SEAL
that ends the beginning of a segment (its HEADER, and the OPENs that it takes over), so that a segment can be read
alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import msgspec

from workers.protocol.journal import (
    MAX_PAYLOAD_BYTES,
    Chain,
    Kind,
    Record,
    Scan,
    SegmentHeader,
    parse_segment_name,
    scan,
)

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * MAX_PAYLOAD_BYTES
KEEP_S = 7 * 24 * 3600


@dataclass(frozen=True)
class Segment:
    first_seq: int
    path: Path


@dataclass(frozen=True)
class Left:
    """The state that a process left: the end of its record chain, and every record since a segment's beginning."""

    chain: Chain
    boot: int
    records: list[Record]


def list_segments(directory: Path) -> list[Segment]:
    found = [
        Segment(first_seq, path)
        for path in directory.iterdir()
        if (first_seq := parse_segment_name(path.name)) is not None
    ]
    return sorted(found, key=lambda segment: segment.first_seq)


def recover(directory: Path) -> Left:
    """Cuts a torn tail, quarantines damage, and returns the records of the last segments that begin whole."""
    records: list[Record] = []
    left: Left | None = None
    for segment in reversed(list_segments(directory)):
        data = segment.path.read_bytes()
        found = scan(data)
        if found.state == "corrupt":
            quarantine(segment.path, data[: found.num_valid_bytes], "damaged before its tail")
        elif found.num_valid_bytes < len(data):
            _cut(segment.path, found.num_valid_bytes)
        if not found.records:
            # Its process died before any record in it was whole; the next segment takes its name.
            segment.path.unlink()
            continue
        records = found.records + records
        if left is None:
            left = Left(found.chain(), _boot(found), [])
        if any(record.kind == Kind.SEAL for record in found.records):
            break
    if left is None:
        return Left(Chain(), 0, [])
    return Left(left.chain, left.boot, records)


def quarantine(path: Path, valid: bytes, reason: str) -> None:
    """Keeps the damaged file under another name; its valid beginning takes its place."""
    log.critical("journal segment %s is %s: kept as .quarantined, %d bytes stand", path.name, reason, len(valid))
    path.rename(path.with_name(path.name + ".quarantined"))
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(valid)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_directory(path.parent)


def drop_old(directory: Path, shipped_seq: int, now_s: float | None = None) -> int:
    """Deletes segments all of whose records were shipped, a week after their last write. Returns the number of deleted
    segments.
    """
    now_s = time.time() if now_s is None else now_s
    segments = list_segments(directory)
    dropped = 0
    for segment, successor in pairwise(segments):
        if successor.first_seq > shipped_seq + 1 or now_s - segment.path.stat().st_mtime < KEEP_S:
            break
        segment.path.unlink()
        dropped += 1
    return dropped


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Reader:
    """Reads records in order, from the first one after `after_seq`, while a journal may be appending.

    Damage is quarantined and skipped with an alarm: the records after it in that segment are lost to this journal.
    """

    def __init__(self, directory: Path, after_seq: int) -> None:
        self._directory = directory
        self._after_seq = after_seq
        self._read_ahead: deque[Record] = deque()
        self._segment: Segment | None = None
        self._position = 0
        self._scan: Scan | None = None

    def read(self, durable_seq: int, max_records: int) -> list[Record]:
        """Returns the next records, none beyond `durable_seq`. An empty list means that there is none yet."""
        while len(self._read_ahead) < max_records and self._advance():
            pass
        found: list[Record] = []
        while self._read_ahead and len(found) < max_records:
            if self._read_ahead[0].seq > durable_seq:
                break
            found.append(self._read_ahead.popleft())
        return found

    def num_bytes_ahead(self) -> int:
        """Returns the number of bytes after the read position, in all segments."""
        num_bytes = 0
        for segment in list_segments(self._directory):
            if self._segment is None or segment.first_seq > self._segment.first_seq:
                num_bytes += segment.path.stat().st_size
            elif segment.first_seq == self._segment.first_seq:
                num_bytes += max(0, segment.path.stat().st_size - self._position)
        return num_bytes

    def _advance(self) -> bool:
        """Reads one more chunk. Returns False if there is nothing more now."""
        if self._segment is None and not self._enter(self._first_segment()):
            return False
        assert self._segment is not None
        with self._segment.path.open("rb") as file:
            file.seek(self._position)
            data = file.read(CHUNK_BYTES)
        found = scan(data, self._scan)
        if not found.records and self._position == 0 and self._scan is not None:
            found = self._after_gap(data, found)
        if found.records:
            self._scan = found
            self._position += found.num_valid_bytes
            self._read_ahead.extend(r for r in found.records if r.seq > self._after_seq)
            return True
        return self._leave(found, data)

    def _after_gap(self, data: bytes, found: Scan) -> Scan:
        """Handles a chain that does not continue from the segment before: that segment's end was lost, or it was
        written anew.
        """
        assert self._scan is not None
        anew = scan(data)
        if anew.records and anew.records[0].seq >= self._scan.next_seq:
            log.critical("journal records %d to %d are missing", self._scan.next_seq, anew.records[0].seq - 1)
            return anew
        return found

    def _leave(self, found: Scan, data: bytes) -> bool:
        """Goes on to the next segment, if there is one, because no valid record is at the position."""
        assert self._segment is not None
        successor = self._successor()
        if successor is None:
            return False
        if found.state == "corrupt":
            quarantine(self._segment.path, self._segment.path.read_bytes()[: self._position], "damaged before its tail")
        elif data.strip(b"\0"):
            log.warning("journal segment %s ends in a torn record", self._segment.path.name)
        return self._enter(successor)

    def _enter(self, segment: Segment | None) -> bool:
        self._segment, self._position = segment, 0
        return segment is not None

    def _first_segment(self) -> Segment | None:
        """Returns the last segment that may hold the first wanted record."""
        segments = list_segments(self._directory)
        before = [segment for segment in segments if segment.first_seq <= self._after_seq + 1]
        return before[-1] if before else next(iter(segments), None)

    def _successor(self) -> Segment | None:
        assert self._segment is not None
        later = [s for s in list_segments(self._directory) if s.first_seq > self._segment.first_seq]
        return next(iter(later), None)


def _cut(path: Path, num_bytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(num_bytes)
        os.fsync(file.fileno())


def _boot(found: Scan) -> int:
    first = found.records[0]
    return msgspec.msgpack.decode(first.payload, type=SegmentHeader).boot if first.kind == Kind.HEADER else 0
