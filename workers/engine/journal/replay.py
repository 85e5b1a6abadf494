"""Records of an engine journal, and the state that its segments give after a restart.

Replay is pure, and `recover` reads the files of one directory. The module knows no attempt, and changes no files except
to set damaged or torn ones right.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from workers.protocol.journal import NO_HASH, Chain, Kind, Record, Scan, SegmentHeader, parse_segment_name, scan
from workers.protocol.messages import EngineRecord

logger = logging.getLogger(__name__)


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """An attempt began. `number` stands for it in the counts."""

    number: int
    request_id: str
    attempt: int
    tenant: str
    root: str
    lease_bound: int


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of an attempt. They are absolute, so the last ones hold."""

    number: int
    cache_read: int
    cache_write: int
    uncached: int
    output: int
    recomputed: int
    lease_bound: int


class Ended(msgspec.Struct, frozen=True, array_like=True):
    number: int
    """Number of the attempt that ended. It is 0 in a checkpoint, because nothing of the attempt is open."""
    record: EngineRecord


class Totals(msgspec.Struct, frozen=True):
    """Sums of this process since its start."""

    prefill: int
    cached: int
    output: int
    recomputed: int


_decode_begun = msgspec.msgpack.Decoder(Begun).decode
_decode_counts = msgspec.msgpack.Decoder(list[Counts]).decode
_decode_ended = msgspec.msgpack.Decoder(Ended).decode
_decode_seq = msgspec.msgpack.Decoder(int).decode


class Replay:
    """The state that the records of a journal give: attempts still open, endings not yet acknowledged. The class is
    pure."""

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
        """Forgets the records up to `seq`, which SQL has. Returns whether there were any."""
        acked = [other for other in self.unacked if other <= seq]
        for other in acked:
            del self.unacked[other]
        return bool(acked)


def segments(directory: Path) -> list[Path]:
    return sorted(p for p in directory.iterdir() if parse_segment_name(p.name) is not None)


def recover(directory: Path) -> tuple[Replay, Chain, int]:
    """Returns state, chain and boot count after the last sound checkpoint. Damaged segments are set aside, not
    deleted."""
    state, boot, next_seq = Replay(), 1, 1
    last: Scan | None = None
    paths = segments(directory)
    for path in reversed(paths):
        found = scan(path.read_bytes())
        next_seq = max(next_seq, _seq_bound(found, path))
        if found.state == "corrupt":
            logger.error(
                "journal segment %s is damaged and set aside", path.name, extra={"event": "journal_quarantined"}
            )
            path.rename(path.with_suffix(".quarantined"))
        elif not found.records:
            path.unlink()  # killed before any record in it was whole: the next segment takes its name
            continue
        replay = Replay(found.records)
        if found.state == "corrupt":
            # After the damage these attempts may have gone on and ended, so their counts may be incomplete.
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
    """Returns the next free number. After a damaged record there may be as many records as the bytes allow."""
    if found.state != "corrupt":
        return found.next_seq  # the records of a torn write were never sent to anybody
    smallest_record = 30
    first = parse_segment_name(path.name) or 1
    return max(found.next_seq, first) + path.stat().st_size // smallest_record + 1
