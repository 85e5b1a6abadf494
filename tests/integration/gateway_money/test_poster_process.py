"""A poster in a process of its own: everything once, whoever of the two dies, and nothing left running."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from load import stretched
from sqlalchemy import func, select, update

from accounting.database.db import Database
from accounting.ledger import ledger
from accounting.requests import request_postings
from accounting.tables.models import EngineRecordRow, JournalOffset, LedgerEntry
from accounting.values.types import Opened, Posting
from gateway.journal.dead_letters import DEAD_LETTERS
from gateway.journal.journal import Journal, open_journal
from gateway.journal.poster_process import NotPosted, PosterProcess
from gateway.journal.shipper import Shipper
from workers.protocol.counts import EngineRecord, EngineRecords, ResidencyReport, TenantHour, TokenUsage

pytestmark = pytest.mark.rest

GATEWAY = """
import asyncio, sys
from pathlib import Path
from gateway.journal.poster_process import PosterProcess

async def main():
    poster = PosterProcess(Path(sys.argv[1]), sys.argv[2], 0, 0)
    await poster.post(0)
    print(poster.pid, flush=True)
    await poster.post(1 << 60)

asyncio.run(main())
"""


def void(number: int) -> Posting:
    return Opened(
        request_id=f"req_{number:08d}",
        tenant_id="proj_1",
        key_id="key_1",
        model="m",
        root="r",
        tier="interactive",
        price_version="standard@1",
        currency="USD",
        opened_at_ms=1_790_000_000_000,
        prompt_tokens=20,
        reserved=10_000,
    ).void("ok", "internal", 1_790_000_001_000)


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    journal = await open_journal(tmp_path / "journal", 0)
    yield journal
    await journal.close()


@pytest.fixture
async def poster(books: Database, journal: Journal) -> AsyncIterator[PosterProcess]:
    poster = PosterProcess(journal.directory, books.url, 0, 0)
    yield poster
    await poster.close()


async def end(journal: Journal, *numbers: int) -> None:
    await asyncio.gather(*(journal.end(void(number)) for number in numbers))


async def ship_all(shipper: Shipper) -> None:
    while await shipper.ship():
        pass


async def posted(books: Database) -> list[str]:
    async with books.read() as conn:
        return list(await conn.scalars(select(LedgerEntry.request_id).order_by("request_id")))


def expected(*numbers: int) -> list[str]:
    return sorted(void(number).request_id for number in numbers)


async def until_gone(pid: int) -> None:
    """Ended; whoever is to reap it may take longer."""
    for _ in range(500):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        except OSError:
            return
        if state == "Z":
            return
        await asyncio.sleep(0.01)
    pytest.fail(f"process {pid} still runs")


async def test_it_posts_everything_and_ends_with_its_close(
    books: Database, journal: Journal, poster: PosterProcess
) -> None:
    shipper = Shipper(journal, poster)
    await end(journal, *range(30))
    await ship_all(shipper)
    assert await posted(books) == expected(*range(30))
    assert shipper.num_posted == 30
    async with books.read() as conn:
        assert await request_postings.journal_offset(conn, 0) == shipper.offset == journal.durable_seq
    pid = poster.pid
    assert pid is not None
    await poster.close()
    await until_gone(pid)


async def test_killed_at_any_moment_it_is_started_again_and_posts_everything_once(
    books: Database, journal: Journal, poster: PosterProcess
) -> None:
    shipper = Shipper(journal, poster)
    await end(journal, *range(10))
    await ship_all(shipper)
    first = poster.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await end(journal, *range(10, 20))
    async with books.write() as conn:
        await ledger.take_turn(conn)  # the next one's posting waits in the middle
        shipping = asyncio.create_task(shipper.ship())
        await _until(lambda: poster.pid not in (first, None))
        await asyncio.sleep(1.5)
        second = poster.pid
        assert second is not None
        os.kill(second, signal.SIGKILL)
        await until_gone(second)
    await shipping
    await ship_all(shipper)
    assert poster.pid not in (first, second)
    assert await posted(books) == expected(*range(20))
    async with books.read() as conn:
        assert await request_postings.journal_offset(conn, 0) == shipper.offset == journal.durable_seq


async def _until(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("waited 10 s in vain")


@pytest.mark.parametrize("is_busy", [False, True])
async def test_it_ends_with_its_gateway_even_in_the_middle_of_a_posting(
    books: Database, journal: Journal, is_busy: bool
) -> None:
    await end(journal, *range(3))
    async with books.write() as conn:
        if is_busy:
            await ledger.take_turn(conn)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", GATEWAY, str(journal.directory), books.url, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None
        pid = int(await process.stdout.readline())
        if is_busy:
            await asyncio.sleep(1.0)
            assert process.returncode is None
        process.kill()
        await process.wait()
        await until_gone(pid)


async def test_signals_are_its_gateways_business(books: Database, journal: Journal, poster: PosterProcess) -> None:
    shipper = Shipper(journal, poster)
    await end(journal, 1)
    await ship_all(shipper)
    pid = poster.pid
    assert pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, number)
    await end(journal, 2)
    await ship_all(shipper)
    assert poster.pid == pid
    assert await posted(books) == expected(1, 2)


async def test_a_row_that_sql_never_takes_and_a_tail_that_sql_lost(
    books: Database, journal: Journal, poster: PosterProcess
) -> None:
    shipper = Shipper(journal, poster)
    await end(journal, *range(5))
    await journal.end(msgspec.structs.replace(void(5), reserved=2**63))  # no BIGINT holds it
    await end(journal, *range(6, 9))
    await ship_all(shipper)
    assert await posted(books) == expected(*range(5), *range(6, 9))
    [letter] = (journal.directory / DEAD_LETTERS).read_text().splitlines()
    assert json.loads(letter)["record"]["request_id"] == "req_00000005"
    assert (shipper.num_posted, shipper.num_refused) == (8, 1)
    async with books.write() as conn:
        await conn.execute(update(JournalOffset).values(offset=3))
    await end(journal, 9)
    await ship_all(shipper)
    assert await posted(books) == expected(*range(5), *range(6, 10))
    async with books.read() as conn:
        assert await request_postings.journal_offset(conn, 0) == shipper.offset == journal.durable_seq


async def test_what_workers_tell_goes_the_same_way(books: Database, journal: Journal, poster: PosterProcess) -> None:
    shipper = Shipper(journal, poster)
    usage = TokenUsage(cache_read=8, uncached=12, output=3, speculated=2)
    frame = EngineRecords(
        "worker-0", tuple(EngineRecord(seq, f"req_{seq:08d}", 0, "proj_1", "r", usage) for seq in (4, 5, 6))
    )
    for _ in range(2):  # sent again after a lost link
        ack = await shipper.keep(frame)
        assert ack is not None
        assert (ack.worker, ack.seq) == ("worker-0", 6)
    report = ResidencyReport("process", "m", (TenantHour(1_790_000_000, "proj_1", 7, 0),))
    assert await shipper.keep(report) is None
    async with books.read() as conn:
        assert await conn.scalar(select(func.count()).select_from(EngineRecordRow)) == 3


async def test_a_database_that_is_away_is_no_reason_to_end(journal: Journal) -> None:
    away = "postgresql+psycopg://nobody@127.0.0.1:1/nothing"
    poster = PosterProcess(journal.directory, away, 0, 0)
    await end(journal, 1)
    with pytest.raises(NotPosted):
        await poster.post(journal.durable_seq)
    pid = poster.pid
    assert pid is not None
    with pytest.raises(NotPosted):
        await poster.post(journal.durable_seq)
    assert poster.pid == pid
    shipper = Shipper(journal, poster, max_outage_s=0.05)
    await shipper.start()
    await _until(lambda: shipper.is_full)
    began = time.monotonic()
    await shipper.close()
    assert time.monotonic() - began < stretched(5)
    await poster.close()
    await until_gone(pid)


async def test_a_call_that_is_given_up_leaves_no_answer_to_the_next(
    books: Database, journal: Journal, poster: PosterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.base.lifecycle.UNINTERRUPTED_S", 0.05)
    await end(journal, *range(3))
    async with books.write() as conn:
        await ledger.take_turn(conn)
        posting = asyncio.create_task(poster.post(journal.durable_seq))
        await asyncio.sleep(1.5)
        posting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await posting
    assert (await poster.post(0)).num_records == 0
    await ship_all(Shipper(journal, poster))
    assert await posted(books) == expected(*range(3))
