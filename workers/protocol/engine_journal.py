"""Records of an engine journal, and the state that they give after a restart. The engine writes them; a restore of a
backup reads them, too. The module is pure.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from workers.protocol.counts import EngineRecord, TokenUsage
from workers.protocol.journal import Kind, Record
from workers.protocol.segments import Left

CRASH_REASON = "worker_crash"


class Begun(msgspec.Struct, frozen=True, array_like=True):
    """An attempt began. `number` stands for it in the counts."""

    number: int
    request_id: str
    attempt: int
    tenant: str
    root: str


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of an attempt. They are absolute, so the last ones hold."""

    number: int
    cache_read: int
    cache_write: int
    uncached: int
    output: int
    recomputed: int


class Ended(msgspec.Struct, frozen=True, array_like=True):
    number: int
    """Number of the attempt that ended. It is 0 in a checkpoint, because nothing of the attempt is open."""
    record: EngineRecord


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
                self.counts.pop(ended.number, None)
                self.unacked[ended.record.seq] = ended.record
            case Kind.ACKED:
                self.ack(_decode_seq(record.payload))

    def ack(self, seq: int) -> bool:
        """Forgets the records up to `seq`, which SQL has. Returns whether there were any."""
        acked = [other for other in self.unacked if other <= seq]
        for other in acked:
            del self.unacked[other]
        return bool(acked)

    def crashed(self, number: int, seq: int) -> EngineRecord:
        """Returns the record that ends an open attempt whose process is gone: its last counts are its ending."""
        begun, counts = self.open[number], self.counts.get(number)
        usage = TokenUsage()
        if counts is not None:
            usage = TokenUsage(
                counts.cache_read, counts.cache_write, counts.uncached, counts.output, 0, counts.recomputed
            )
        return EngineRecord(seq, begun.request_id, begun.attempt, begun.tenant, begun.root, usage, CRASH_REASON)


def replay(left: Left) -> Replay:
    """Returns the state that a process left. After damage, attempts may have gone on and ended unseen. So their counts
    may be incomplete, and nothing is said of them.
    """
    state = Replay(left.records)
    if left.is_damaged:
        state.open.clear()
        state.counts.clear()
    return state
