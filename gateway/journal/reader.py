"""Reads a journal's records in order, while its owner may be appending."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

from workers.protocol.journal import MAX_PAYLOAD_BYTES, Record, Scan, scan
from workers.protocol.segments import Segment, list_segments, quarantine

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 * MAX_PAYLOAD_BYTES


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
        if len(data) < CHUNK_BYTES and self._segment.path.stat().st_size > self._position + len(data):
            return True  # it grew between the read and the look, and only then did its successor begin
        if found.state == "corrupt":
            quarantine(self._segment, self._position)
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
