"""Journal to ledger on both dialects: everything once, whatever SQL does."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from sqlalchemy import func, select, update
from sqlalchemy.exc import OperationalError

from accounting.prices import pricing
from accounting.requests import request_postings
from accounting.tables.models import EngineRecordRow, JournalOffset, LedgerEntry
from accounting.values.types import Opened, Posting, Rates, Usage
from gateway.journal.dead_letters import DEAD_LETTERS
from gateway.journal.journal import Journal, open_journal
from gateway.journal.poster import Poster
from gateway.journal.shipper import Shipper
from gateway.readiness import of_database
from workers.process.rounds import num_failed
from workers.protocol.counts import EngineRecord, EngineRecords, TokenUsage
from workers.protocol.journal import Kind

RATES = Rates(1_000_000, 4_000_000, 4_000_000, 10_000_000)


def opened(number: int) -> Opened:
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
    )


def settle(number: int) -> Posting:
    usage = Usage(cache_read=8, uncached=12, output=number % 7)
    void = opened(number).void("ok", "internal", 1_790_000_001_000)
    return msgspec.structs.replace(void, kind="settle", usage=usage, charge=pricing.charge(usage, RATES))


class Outage:
    """A database whose transactions fail, before the COMMIT or after it, as often as asked."""

    def __init__(self, database) -> None:
        self._database = database
        self.answers = asyncio.Event()
        """Not set while transactions neither fail nor begin."""
        self.answers.set()
        self.before = 0
        self.after = 0
        self.num_begun = self.fails_at = 0
        """The number of transactions so far, and that of one that does not begin."""
        self.num_failed = 0

    @asynccontextmanager
    async def write(self):
        self.num_begun += 1
        await self.answers.wait()
        if self.before or self.num_begun == self.fails_at:
            self.before = max(0, self.before - 1)
            self.num_failed += 1
            raise OperationalError("BEGIN", {}, ConnectionError("gone"))
        async with self._database.write() as conn:
            yield conn
        if self.after:
            self.after -= 1
            self.num_failed += 1
            raise OperationalError("COMMIT", {}, ConnectionError("no reply"))


@pytest.fixture
async def journal(tmp_path: Path):
    journal = await open_journal(tmp_path / "journal", 0)
    yield journal
    await journal.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.journal.shipper.EVERY_S", 0.005)
    monkeypatch.setattr("gateway.journal.shipper.MEASURE_EVERY_S", 0.01)


async def write(journal: Journal, *numbers: int) -> None:
    for number in numbers:
        await journal.open(opened(number))
    await asyncio.gather(*(journal.end(settle(number)) for number in numbers))


async def entries(books) -> dict[str, int]:
    async with books.read() as conn:
        rows = (await conn.execute(select(LedgerEntry.request_id, LedgerEntry.charge))).all()
    return {row.request_id: row.charge for row in rows}


def expected(*numbers: int) -> dict[str, int]:
    return {settle(n).request_id: settle(n).charge.total for n in numbers}


async def ship_all(shipper: Shipper) -> None:
    while await shipper.ship():
        pass


async def test_an_outage_and_lost_commit_replies_ship_everything_once(books, journal: Journal, quick) -> None:
    database = Outage(books)
    shipper = Shipper(journal, Poster(journal.directory, database, 0, 0))
    await write(journal, *range(50))
    database.before, database.after = 3, 0
    await ship_all(shipper)
    await write(journal, *range(50, 80))
    database.after = 2
    await ship_all(shipper)
    assert database.num_failed == 5
    assert await entries(books) == expected(*range(80))
    async with books.read() as conn:
        assert await request_postings.journal_offset(conn, 0) == shipper.offset == journal.durable_seq


LIMITS = pytest.mark.parametrize("limit", [{"max_outage_s": 0.02}, {"max_backlog_bytes": 1000}])


@LIMITS
async def test_admission_closes_when_the_backlog_is_too_old_or_too_large_and_opens_again(
    sqlite_books, journal: Journal, quick, limit: dict[str, float]
) -> None:
    database = Outage(sqlite_books)
    database.before = 1 << 30
    await write(journal, 1)
    shipper = Shipper(journal, Poster(journal.directory, database, 0, 0), **limit)
    assert not shipper.is_full
    await shipper.start()
    await asyncio.sleep(0.02)
    await write(journal, *range(10, 20))
    await _until(lambda: shipper.is_full)
    database.before = 0
    await _until(lambda: not shipper.is_full)
    await shipper.close()
    assert await entries(sqlite_books) == expected(1, *range(10, 20))


@LIMITS
async def test_a_posting_that_hangs_closes_admission_as_one_that_fails_does(
    sqlite_books, journal: Journal, quick, limit: dict[str, float]
) -> None:
    """It waits for a lock of a gateway whose host is gone. Neither bound was looked at, because no call failed."""
    database = Outage(sqlite_books)
    database.answers.clear()
    shipper = Shipper(journal, Poster(journal.directory, database, 0, 0), **limit)
    await shipper.start()
    assert not shipper.is_full
    await write(journal, *range(10))
    await _until(lambda: shipper.is_full)
    assert not shipper.is_failing
    database.answers.set()
    await _until(lambda: not shipper.is_full)
    await shipper.close()
    assert await entries(sqlite_books) == expected(*range(10))


async def _until(condition) -> None:
    for _ in range(400):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("waited 4 s in vain")


async def test_a_shipper_at_rest_hears_of_a_record_at_once(sqlite_books, journal: Journal, quick, monkeypatch) -> None:
    monkeypatch.setattr("gateway.journal.shipper.REST_AFTER", 1)
    monkeypatch.setattr("gateway.journal.shipper.REST_EVERY_S", 3600.0)
    shipper = Shipper(journal, Poster(journal.directory, sqlite_books, 0, 0))
    await shipper.start()
    for number in range(3):
        await _until(lambda: shipper._num_empty > 1)
        await write(journal, number)
        await _until(lambda: not shipper.num_unshipped)
    await shipper.close()
    assert await entries(sqlite_books) == expected(*range(3))


async def test_a_clean_up_that_fails_ends_no_shipping(sqlite_books, journal: Journal, quick, monkeypatch) -> None:
    num_calls = 0

    def fail_once(*_) -> int:
        nonlocal num_calls
        num_calls += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr("gateway.journal.shipper.drop_old", fail_once)
    shipper = Shipper(journal, Poster(journal.directory, sqlite_books, 0, 0))
    await shipper.start()
    await _until(lambda: num_calls)
    await write(journal, 1)
    await _until(lambda: not shipper.num_unshipped)
    await shipper.close()
    assert await entries(sqlite_books) == expected(1)


async def test_a_shipper_that_ended_by_itself_is_seen_and_counted_and_can_be_closed(
    sqlite_books, journal: Journal, quick, caplog
) -> None:
    poster = Poster(journal.directory, sqlite_books, 0, 0)
    post, poster.post = poster.post, None
    shipper = Shipper(journal, poster)
    await write(journal, 1)
    assert not shipper.has_failed
    await shipper.start()
    num_faults = num_failed["Shipper._run"]
    await _until(lambda: shipper.has_failed)
    await _until(lambda: num_failed["Shipper._run"] == num_faults + 1)
    assert "background_task_failed" in caplog.text
    auth = SimpleNamespace(silent_s=0.0)
    assert of_database(auth, shipper).state == "failing"
    poster.post = post
    await shipper.close()
    assert await entries(sqlite_books) == expected(1)
    assert not shipper.has_failed


async def test_an_outage_that_a_cancelled_call_noticed_is_over_without_a_further_call(
    sqlite_books, journal: Journal, quick
) -> None:
    """Nothing was admitted for ever, because nothing that ended would have asked SQL again."""
    database = Outage(sqlite_books)
    database.before = 1 << 30
    shipper = Shipper(journal, Poster(journal.directory, database, 0, 0), max_outage_s=0.05)
    await ship_all(shipper)  # the beginning of the journal has no ending
    usage = TokenUsage(cache_read=8, uncached=12, output=3, speculated=2)
    keeping = asyncio.create_task(
        shipper.keep(EngineRecords("worker-0", (EngineRecord(4, "req_00000004", 0, "proj_1", "r", usage),)))
    )
    await _until(lambda: shipper.is_failing)
    await asyncio.sleep(0.1)
    assert not shipper.is_full  # nothing waits for SQL
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    database.before = 0
    assert not shipper.is_failing
    await write(journal, 1)
    assert not shipper.is_full


async def test_a_database_that_lost_its_tail_gets_it_again(sqlite_books, journal: Journal) -> None:
    shipper = Shipper(journal, Poster(journal.directory, sqlite_books, 0, 0))
    await write(journal, *range(5))
    await ship_all(shipper)
    async with sqlite_books.write() as conn:
        await conn.execute(update(JournalOffset).values(offset=3))  # a failover took it back, with its rows
    await write(journal, 5)
    await ship_all(shipper)
    assert await entries(sqlite_books) == expected(*range(6))
    async with sqlite_books.read() as conn:
        assert await request_postings.journal_offset(conn, 0) == journal.durable_seq


async def test_an_unpostable_row_goes_to_the_dead_letters_and_holds_nobody_up(
    books, journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    shipper = Shipper(journal, Poster(journal.directory, books, 0, 0))
    await write(journal, *range(9))
    await journal.end(msgspec.structs.replace(settle(9), reserved=2**63))  # no BIGINT holds it
    await write(journal, *range(10, 17))
    await ship_all(shipper)
    assert await entries(books) == expected(*range(9), *range(10, 17))
    assert (shipper.num_posted, shipper.num_refused) == (16, 1)
    [letter] = (journal.directory / DEAD_LETTERS).read_text().splitlines()
    assert json.loads(letter)["record"]["request_id"] == "req_00000009"
    assert "cannot be posted" in caplog.text
    async with books.read() as conn:
        assert await request_postings.journal_offset(conn, 0) == journal.durable_seq


async def test_a_refused_ending_counts_once_although_sql_goes_away_behind_it(sqlite_books, journal: Journal) -> None:
    database = Outage(sqlite_books)
    poster = Poster(journal.directory, database, 0, 0)
    await journal.end(msgspec.structs.replace(settle(0), reserved=2**63))
    await write(journal, 1)
    database.fails_at = 3  # both, then the first alone, then the second
    with pytest.raises(OperationalError):
        await poster.post(journal.durable_seq)
    posted = await poster.post(journal.durable_seq)
    assert (posted.num_new, posted.num_refused) == (1, 1)


async def test_an_unreadable_record_that_no_disk_takes_loses_no_record_around_it(
    sqlite_books, journal: Journal, monkeypatch
) -> None:
    poster = Poster(journal.directory, sqlite_books, 0, 0)
    await write(journal, 1)
    unreadable = msgspec.msgpack.encode({"request_id": "req_x", "outcome": "a newer word"})
    await journal._append(Kind.VOID, unreadable, "req_x", durable=True)
    await write(journal, 2)

    def bury_nothing(*_) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr("gateway.journal.poster.bury", bury_nothing)
        with pytest.raises(OSError, match="No space"):
            await poster.post(journal.durable_seq)
    posted = await poster.post(journal.durable_seq)
    assert (posted.num_endings, posted.num_new, posted.num_refused) == (2, 2, 1)
    assert await entries(sqlite_books) == expected(1, 2)


async def test_only_what_is_on_the_disk_is_shipped(sqlite_books, tmp_path: Path) -> None:
    journal = await open_journal(tmp_path / "journal", 0)
    shipper = Shipper(journal, Poster(journal.directory, sqlite_books, 0, 0))
    await write(journal, 1)
    durable = journal.durable_seq
    await journal.close()
    journal._synced_seq = durable - 1  # as if the last sync had not come back
    assert await shipper.ship()
    assert await entries(sqlite_books) == {}


async def test_engine_records_are_acknowledged_after_their_commit(books, journal: Journal, quick) -> None:
    database = Outage(books)
    shipper = Shipper(journal, Poster(journal.directory, database, 0, 0))
    usage = TokenUsage(cache_read=8, uncached=12, output=3, speculated=2)
    frame = EngineRecords(
        "worker-0", tuple(EngineRecord(seq, f"req_{seq:08d}", 0, "proj_1", "r", usage) for seq in (4, 5, 6))
    )
    database.before, database.after = 2, 1
    ack = await shipper.post_engine_records(frame)
    assert (ack.worker, ack.seq) == ("worker-0", 6)
    assert (await shipper.post_engine_records(frame)).seq == 6  # sent again after a lost link
    async with books.read() as conn:
        assert await conn.scalar(select(func.count()).select_from(EngineRecordRow)) == 3
