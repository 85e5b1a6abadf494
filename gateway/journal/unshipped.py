"""The part of a gateway slot's journal that SQL does not have yet: requests that run, or that ended and were not
shipped.

It only reads, also while a living process owns the journal. It knows the journal's format; the caller decides what to
do about the requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from accounting.values.types import Posting
from gateway.journal import journal_records
from workers.protocol.journal import MAX_PAYLOAD_BYTES, Kind, Record, Scan, num_bytes_until, scan
from workers.protocol.segments import Segment, list_segments

CHUNK_BYTES = 2 * MAX_PAYLOAD_BYTES
"""The size of one read, at least that of the largest record."""
OLD_MS = 600_000
"""The age from which engine records count as unended. They wait for their endings no longer than an outage is shipped
after; younger records are left alone.
"""


@dataclass(frozen=True)
class Unshipped:
    running: frozenset[str]
    """Requests that are opened and not ended."""
    ended: frozenset[str]
    """Requests that ended after SQL's offset."""
    postings: tuple[Posting, ...] = ()
    """The postings of those endings."""

    @property
    def requests(self) -> frozenset[str]:
        return self.running | self.ended


def unshipped(directory: Path, offset: int) -> Unshipped:
    """Reads the journal's unshipped part. `offset` is the last record of this journal that is in SQL.
    Raises OSError.
    """
    running: set[str] = set()
    ended: dict[str, Posting] = {}
    for segment in _segments_from(directory, offset):
        opened_here: set[str] = set()
        for record in _records(segment.path):
            if record.kind == Kind.OPEN:
                request_id = journal_records.opened(record.payload).request_id
                running.add(request_id)
                opened_here.add(request_id)
            elif record.kind == Kind.SEAL:
                running &= opened_here  # what is not taken over was ended in SQL, while the journal was poisoned
            elif record.kind in (Kind.SETTLE, Kind.VOID):
                posting = journal_records.posting(record.payload)
                running.discard(posting.request_id)
                opened_here.discard(posting.request_id)
                if record.seq > offset:
                    ended.setdefault(posting.request_id, posting)
    return Unshipped(frozenset(running), frozenset(ended), tuple(ended.values()))


def ended_behind(directory: Path, offset: int) -> list[Posting]:
    """Returns the postings of `unshipped`, without reading what is in SQL. Raises OSError."""
    ended: dict[str, Posting] = {}
    for segment in _segments_from(directory, offset):
        for record in _records(segment.path, offset):
            if record.kind in (Kind.SETTLE, Kind.VOID) and record.seq > offset:
                posting = journal_records.posting(record.payload)
                ended.setdefault(posting.request_id, posting)
    return list(ended.values())


def num_bytes_unshipped(directory: Path, offset: int) -> int:
    """Returns the size of the segments that hold what SQL does not have: up to one segment too much. Raises OSError."""
    return sum(segment.path.stat().st_size for segment in _segments_from(directory, offset))


def _segments_from(directory: Path, offset: int) -> list[Segment]:
    """Returns the segments from the last one that begins at or before the offset: a segment repeats the OPENs it takes
    over.
    """
    segments = list_segments(directory)
    before = [segment for segment in segments if segment.first_seq <= offset]
    return [*before[-1:], *segments[len(before) :]]


def _records(path: Path, after_seq: int = 0) -> Iterator[Record]:
    for found in scans(path, after_seq):
        yield from found.records


def scans(path: Path, after_seq: int = 0) -> Iterator[Scan]:
    """Scans a segment a chunk at a time: it has up to 64 MiB, and as records it would take several times that. The last
    scan has no records, and the state of all that follows them.
    """
    before: Scan | None = None
    with path.open("rb") as file:
        position = _skip(file, after_seq)
        while True:
            file.seek(position)
            found = scan(file.read(CHUNK_BYTES), before)
            if not found.records:
                file.seek(position)
                yield scan(file.read(), before)
                return
            yield found
            position += found.num_valid_bytes
            before = found


def _skip(file: BinaryIO, after_seq: int) -> int:
    """Returns the position after that record."""
    position = 0
    while after_seq:
        file.seek(position)
        skipped = num_bytes_until(file.read(CHUNK_BYTES), after_seq)
        if not skipped:
            break
        position += skipped
    return position
