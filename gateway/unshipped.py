"""What a gateway slot's journal holds that SQL has not yet: requests that run, or ended and were not shipped.

Reads only, beside a living owner too. Knows the journal's format; what is done about the requests is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gateway import journal_records as records
from gateway.segments import list_segments
from workers.protocol.journal import Kind, Record, scan


@dataclass(frozen=True)
class Unshipped:
    running: frozenset[str]
    """Opened and not ended."""
    ended: frozenset[str]
    """Ended behind SQL's offset."""

    @property
    def requests(self) -> frozenset[str]:
        return self.running | self.ended


def unshipped(directory: Path, offset: int) -> Unshipped:
    """`offset`: the last record of this journal that is in SQL. Raises OSError."""
    running: set[str] = set()
    ended: set[str] = set()
    for record in _records_from(directory, offset):
        if record.kind == Kind.OPEN:
            running.add(records.opened(record.payload).request_id)
        elif record.kind in (Kind.SETTLE, Kind.VOID):
            request_id = records.posting(record.payload).request_id
            running.discard(request_id)
            if record.seq > offset:
                ended.add(request_id)
    return Unshipped(frozenset(running), frozenset(ended))


def _records_from(directory: Path, offset: int) -> Iterable[Record]:
    """From the last segment that begins at or before the offset: a segment repeats the OPENs it takes over."""
    segments = list_segments(directory)
    before = [segment for segment in segments if segment.first_seq <= offset]
    for segment in [*before[-1:], *segments[len(before) :]]:
        yield from scan(segment.path.read_bytes()).records
