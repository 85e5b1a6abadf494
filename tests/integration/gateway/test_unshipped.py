"""What a journal knows that SQL does not, read beside its living owner."""

from __future__ import annotations

import asyncio
import errno
import os
import tracemalloc

import pytest
from money import NOON_MS, posting

from accounting.values.types import Opened
from gateway.journal import journal_records
from gateway.journal.journal import JournalPoisoned, open_journal
from gateway.journal.unshipped import Unshipped, ended_behind, unshipped
from workers.protocol.journal import Chain, Kind, segment_name


def opened(request_id: str) -> Opened:
    return Opened(
        request_id=request_id,
        tenant_id="proj_a",
        key_id="key_a",
        model="m",
        root="r",
        tier="interactive",
        price_version="standard@1",
        currency="USD",
        opened_at_ms=NOON_MS,
        prompt_tokens=5,
        reserved=10,
    )


@pytest.fixture(params=[64 * 1024 * 1024, 600], ids=["one segment", "many segments"])
async def journal(tmp_path, request):
    journal = await open_journal(tmp_path / "journal", 0, segment_bytes=request.param)
    yield journal
    await journal.close()


async def test_what_runs_and_what_ended_behind_the_offset(tmp_path, journal):
    assert unshipped(tmp_path / "journal", 0) == Unshipped(frozenset(), frozenset())
    for number in range(6):
        await asyncio.shield(journal.open(opened(f"req_{number}")))
    await journal.end(posting("req_0"))
    shipped = journal.durable_seq
    await journal.end(posting("req_1", kind="void"))
    await journal.end(posting("req_4"))
    found = unshipped(tmp_path / "journal", shipped)
    assert found.running == {"req_2", "req_3", "req_5"}
    assert found.ended == {"req_1", "req_4"}
    assert found.requests == {"req_1", "req_2", "req_3", "req_4", "req_5"}
    everything = unshipped(tmp_path / "journal", journal.durable_seq)
    assert everything == Unshipped(frozenset({"req_2", "req_3", "req_5"}), frozenset())


async def test_what_sql_ended_while_the_journal_was_poisoned_runs_no_more(tmp_path):
    is_broken = False

    def sync(descriptor: int) -> None:
        if is_broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fdatasync(descriptor)

    journal = await open_journal(tmp_path / "journal", 0, sync=sync)
    await asyncio.gather(*(journal.open(opened(f"req_{number}")) for number in range(3)))
    await asyncio.sleep(0.05)
    is_broken = True
    with pytest.raises(JournalPoisoned):
        await journal.end(posting("req_9"))
    journal.forget("req_0")
    is_broken = False
    assert await journal.revive()
    assert unshipped(tmp_path / "journal", 3).running == {"req_1", "req_2"}
    await journal.open(opened("req_3"))
    await journal.end(posting("req_1"))
    await journal.open(opened("req_4"))
    assert unshipped(tmp_path / "journal", 3).running == {"req_2", "req_3", "req_4"}
    await journal.close()


async def test_what_ended_behind_the_offset_alone(tmp_path, journal):
    for number in range(6):
        await asyncio.shield(journal.open(opened(f"req_{number}")))
        await journal.end(posting(f"req_{number}"))
        for offset in range(journal.durable_seq + 1):
            found = ended_behind(tmp_path / "journal", offset)
            assert tuple(found) == unshipped(tmp_path / "journal", offset).postings


@pytest.mark.parametrize("reads", [unshipped, ended_behind])
def test_p3_a_long_journal_is_not_read_into_memory_as_a_whole(tmp_path, reads):
    """P3: each minute's check of the books did so; a full segment took 64 MiB, and its records several times that."""
    count, chain = 40_000, Chain()
    payloads = [journal_records.encode(posting(f"req_{number}")) for number in range(3)]
    with (tmp_path / segment_name(1)).open("wb") as file:
        for number in range(count):
            file.write(chain.encode(Kind.SETTLE, payloads[number % 3]))
        size = file.tell()
    tracemalloc.start()
    try:
        found = reads(tmp_path, count - 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found if isinstance(found, list) else list(found.postings)) == [posting("req_0")]
    assert peak < size
