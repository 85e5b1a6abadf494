"""How often the shipper begins a transaction: a busy gateway gathers for longer, and a worker's records wait for others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gateway.journal import shipper as module
from gateway.journal.poster import Posted
from gateway.journal.shipper import Shipper
from workers.protocol.counts import EngineAck, EngineRecord, EngineRecords, TokenUsage


class Poster:
    """Takes everything, and notes when."""

    offset = 0

    def __init__(self) -> None:
        self.times: list[float] = []

    async def post(self, durable_seq: int) -> Posted:
        self.times.append(asyncio.get_running_loop().time())
        number, self.offset = durable_seq - self.offset, durable_seq
        return Posted(number, number, durable_seq, durable_seq, number)

    async def post_engine_records(self, frame: EngineRecords) -> EngineAck:
        self.times.append(asyncio.get_running_loop().time())
        return EngineAck(frame.worker, frame.records[-1].seq)


def frame(worker: str, count: int) -> EngineRecords:
    records = [EngineRecord(n, f"req_{n}", 0, "proj_1", "r", TokenUsage(), reason="length") for n in range(count)]
    return EngineRecords(worker, tuple(records))


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY_S", 0.2)
    monkeypatch.setattr(module, "BUSY_EVERY_S", 0.8)


@pytest.mark.parametrize(
    ("records", "least_s", "most_s"), [(module.BUSY_RECORDS - 1, 0.19, 0.75), (module.BUSY_RECORDS, 0.79, 5.0)]
)
async def test_the_pause_after_many_records_is_longer_and_a_hurry_ends_it(
    tmp_path: Path, records: int, least_s: float, most_s: float
) -> None:
    journal: Any = SimpleNamespace(durable_seq=records, directory=tmp_path)
    poster = Poster()
    shipper = Shipper(journal, poster)
    await shipper.start()
    await asyncio.sleep(0.01)
    journal.durable_seq += 1
    await shipper.caught_up()
    assert least_s <= poster.times[1] - poster.times[0] < most_s
    journal.durable_seq += records
    await shipper.caught_up()
    journal.durable_seq += 1
    began = asyncio.get_running_loop().time()
    await shipper.caught_up(soon=True)
    assert asyncio.get_running_loop().time() - began < 0.7
    await shipper.close()


async def test_a_frame_of_engine_records_waits_for_the_one_before_of_its_worker_unless_that_was_large(
    tmp_path: Path,
) -> None:
    poster = Poster()
    shipper = Shipper(SimpleNamespace(durable_seq=0, directory=tmp_path), poster)  # type: ignore[arg-type]  # no journal
    await shipper.post_engine_records(frame("a", 1))
    await shipper.post_engine_records(frame("b", 1))
    assert poster.times[1] - poster.times[0] < 0.18
    await shipper.post_engine_records(frame("a", module.MANY_ENGINE_RECORDS))
    assert poster.times[2] - poster.times[0] >= 0.19
    await shipper.post_engine_records(frame("a", 1))
    assert poster.times[3] - poster.times[2] < 0.18
    close = asyncio.create_task(shipper.close())
    await asyncio.sleep(0)
    assert (await shipper.post_engine_records(frame("a", 2))).seq == 1
    await close
