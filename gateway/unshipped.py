"""What a gateway slot's journal holds that SQL has not yet: requests that run, or ended and were not shipped.

Reads only, beside a living owner too. Knows the journal's format; what is done about the requests is the caller's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from accounting.types import Posting
from gateway import journal_records as records
from gateway.segments import list_segments
from workers.protocol.journal import Kind, Record, scan


@dataclass(frozen=True)
class Unshipped:
    running: frozenset[str]
    """Opened and not ended."""
    ended: frozenset[str]
    """Ended behind SQL's offset."""
    postings: tuple[Posting, ...] = ()
    """Of those."""

    @property
    def requests(self) -> frozenset[str]:
        return self.running | self.ended


def unshipped(directory: Path, offset: int) -> Unshipped:
    """`offset`: the last record of this journal that is in SQL. Raises OSError."""
    running: set[str] = set()
    ended: dict[str, Posting] = {}
    for record in _records_from(directory, offset):
        if record.kind == Kind.OPEN:
            running.add(records.opened(record.payload).request_id)
        elif record.kind in (Kind.SETTLE, Kind.VOID):
            posting = records.posting(record.payload)
            running.discard(posting.request_id)
            if record.seq > offset:
                ended.setdefault(posting.request_id, posting)
    return Unshipped(frozenset(running), frozenset(ended), tuple(ended.values()))


def _records_from(directory: Path, offset: int) -> Iterable[Record]:
    """From the last segment that begins at or before the offset: a segment repeats the OPENs it takes over."""
    segments = list_segments(directory)
    before = [segment for segment in segments if segment.first_seq <= offset]
    for segment in [*before[-1:], *segments[len(before) :]]:
        yield from scan(segment.path.read_bytes()).records
