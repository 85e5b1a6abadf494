"""Journals that were written before gateway and engine shared one implementation (2026-11-23) are recovered by it.

`tests/old_journals` holds what a killed gateway and a killed worker left then, without lock and ballast. In the gateway's
journal the requests 1 to 8 were opened; 1, 3, 6 and 7 were settled and 4 was voided. In the engine's journal `first` and
`done` ended, `first` was acknowledged, and `open` ran with 25 output tokens. In both the last record is an important one:
the SETTLE of 7, and the last count of `open`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from gateway.journal import journal_records
from gateway.journal.journal import open_journal
from gateway.journal.reader import Reader
from workers.engine.journal.journal import EngineJournal
from workers.protocol.counts import EngineRecord, TokenUsage
from workers.protocol.engine_journal import CRASH_REASON, Replay
from workers.protocol.journal import Kind, Record, segment_name
from workers.protocol.segments import list_segments, recover

OLD = Path(__file__).parents[2] / "old_journals"
BALLAST = 4096
NEXT_SEQ = {"gateway": 37, "engine": 41}


def whole(directory: Path) -> None:
    pass


def torn(directory: Path) -> None:
    path = list_segments(directory)[-1].path
    path.write_bytes(path.read_bytes()[:-5])


def padded(directory: Path) -> None:
    path = list_segments(directory)[-1].path
    path.write_bytes(path.read_bytes() + bytes(4096))


def begun(directory: Path) -> None:
    (directory / segment_name(NEXT_SEQ[directory.name])).touch()


def damaged_before_the_last_record(directory: Path) -> None:
    path = list_segments(directory)[-1].path
    data = bytearray(path.read_bytes())
    data[_last_record(data) - 3] ^= 1
    path.write_bytes(data)


def damaged_in_its_header(directory: Path) -> None:
    path = list_segments(directory)[-1].path
    data = bytearray(path.read_bytes())
    data[30] ^= 1
    path.write_bytes(data)


def _last_record(data: bytes) -> int:
    at = 0
    while (end := at + 8 + int.from_bytes(data[at : at + 4])) < len(data):
        at = end
    return at


def copied(name: str, tmp_path: Path) -> Path:
    directory = tmp_path / name
    shutil.copytree(OLD / name, directory)
    return directory


@pytest.mark.parametrize(
    ("happen", "voided"),
    [
        (whole, {2, 5, 8}),
        (padded, {2, 5, 8}),
        (begun, {2, 5, 8}),
        (torn, {2, 5, 7, 8}),
        (damaged_before_the_last_record, {2, 5, 7, 8}),
        (damaged_in_its_header, {2, 5, 7}),
    ],
)
async def test_an_old_gateways_journal_ends_what_ran(tmp_path: Path, happen, voided: set[int]) -> None:
    directory = copied("gateway", tmp_path)
    happen(directory)
    journal = await open_journal(directory, 0, ballast_bytes=BALLAST)
    await journal.close()
    read = Reader(directory, 0).read(1 << 60, 1000)
    seqs = [record.seq for record in read]
    assert seqs == sorted(set(seqs))
    endings = [journal_records.posting(record.payload) for record in read if record.kind in (Kind.SETTLE, Kind.VOID)]
    assert len({ending.request_id for ending in endings}) == len(endings)
    assert {ending.request_id for ending in endings if ending.outcome == "gateway_crash"} == {
        f"req_{number:08d}" for number in voided
    }
    settled = {1, 3, 6, 7} - voided
    assert {ending.request_id: ending.charge.total for ending in endings if ending.kind == "settle"} == {
        f"req_{number:08d}": 1234 for number in settled
    }
    again = await open_journal(directory, 0, ballast_bytes=BALLAST)
    await again.close()
    num_voids = sum(record.kind == Kind.VOID for record in Reader(directory, 0).read(1 << 60, 1000))
    assert num_voids == len(voided) + 1


@pytest.mark.parametrize(
    ("happen", "crashed"),
    [
        (whole, {"open": 25}),
        (padded, {"open": 25}),
        (begun, {"open": 25}),
        (torn, {"open": 24}),
        (damaged_before_the_last_record, {}),
        (damaged_in_its_header, {}),
    ],
)
def test_an_old_workers_journal_gives_the_records_that_nobody_acknowledged(
    tmp_path: Path, happen, crashed: dict[str, int]
) -> None:
    directory = copied("engine", tmp_path)
    happen(directory)
    for _ in range(2):  # what the first start has found, the second one finds too
        journal = EngineJournal(directory, "worker-0", "process", "root", ballast_bytes=BALLAST)
        journal.close()
        found = {record.request_id: record for record in journal.unacked}
        assert found.keys() == {"done", *crashed}
        assert (found["done"].seq, found["done"].usage.output) == (11, 2)
        ended = {name: record for name, record in found.items() if record.reason == CRASH_REASON}
        assert {name: record.usage.output for name, record in ended.items()} == crashed
        assert all(record.seq >= NEXT_SEQ["engine"] for record in ended.values())


def test_an_old_engine_record_has_a_lease_bound_that_nobody_reads() -> None:
    """It stands before the reason in a frame, and at the end of what a journal says of an attempt's beginning and counts."""
    record = {"seq": 1, "request_id": "r", "attempt": 0, "tenant": "t", "root": "x", "usage": {"output": 2}}
    old = msgspec.msgpack.encode({**record, "lease_bound": 64, "reason": "length"})
    read = msgspec.msgpack.decode(old, type=EngineRecord)
    assert (read.usage, read.reason) == (TokenUsage(output=2), "length")
    begun = msgspec.msgpack.encode([1, "r", 0, "t", "x", 64])
    counts = msgspec.msgpack.encode([[1, 5, 6, 7, 8, 9, 64]])
    state = Replay([Record(Kind.BEGUN, 1, begun), Record(Kind.COUNTS, 2, counts)])
    assert state.crashed(1, 3) == EngineRecord(3, "r", 0, "t", "x", TokenUsage(5, 6, 7, 8, 0, 9), CRASH_REASON)


@pytest.mark.parametrize("name", ["gateway", "engine"])
@pytest.mark.parametrize("happen", [damaged_before_the_last_record, damaged_in_its_header])
def test_damage_is_set_aside_and_told_and_its_numbers_are_not_used_again(
    tmp_path: Path, name: str, happen, caplog: pytest.LogCaptureFixture
) -> None:
    directory = copied(name, tmp_path)
    happen(directory)
    damaged = list_segments(directory)[-1].path
    data = damaged.read_bytes()
    for _ in range(2):  # a crash before the next segment stands changes nothing
        left = recover(directory)
        assert left.is_damaged
        assert left.chain.next_seq >= NEXT_SEQ[name]
    [aside] = directory.glob("*.quarantined")
    assert aside.name == damaged.name + ".quarantined"
    assert aside.read_bytes() == data
    assert caplog.text.count("is set aside") == 1
