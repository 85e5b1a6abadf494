"""Journals that somebody has to look after: nobody owns them, or they are damaged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from migrated import migrated_database
from money import NOON_MS, posting
from prometheus_client import CollectorRegistry

from accounting.database.db import Database
from accounting.requests import request_postings
from accounting.values.types import Opened
from gateway.books.journal_watch import JournalWatch
from gateway.journal.journal import open_journal


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    await migrated_database(database_url)
    database = Database(database_url)
    yield database
    await database.close()


class Watched:
    """The journals below a folder, and what a scrape says of them."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.run_dir = folder / "run"
        self.state = folder / "state"
        self.run_dir.mkdir()
        self._registry = CollectorRegistry()
        self._watch = JournalWatch(database, self._registry, self.state, self.run_dir)

    async def looks(self, number: int = 2) -> tuple[float | None, float | None]:
        """The unreplayed journals and the damaged segments, after some looks."""
        for _ in range(number):
            await self._watch.look()
        value = self._registry.get_sample_value
        return value("headgate_journals_unreplayed"), value("headgate_journal_quarantined_segments")

    async def left_by_a_dead_gateway(self, slot: int) -> int:
        """A journal with one ending. Returns its number."""
        journal = await open_journal(self.state / f"gateway-{slot}" / "journal", slot)
        await journal.open(opened())
        await journal.end(posting("req_1"))
        last = journal.durable_seq
        await journal.close()
        return last


@pytest.fixture
def watched(database: Database, tmp_path: Path) -> Watched:
    return Watched(database, tmp_path)


def opened() -> Opened:
    return Opened(
        request_id="req_1",
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


async def test_a_journal_without_an_owner_is_seen_until_sql_has_all_of_it(watched: Watched, database: Database) -> None:
    assert await watched.looks() == (0, 0)
    last = await watched.left_by_a_dead_gateway(3)
    assert await watched.looks(1) == (0, 0), "its owner may just be starting"
    assert await watched.looks(1) == (1, 0)
    await watched.left_by_a_dead_gateway(4)
    assert await watched.looks() == (2, 0)
    async with database.write() as conn:
        await request_postings.post(conn, 3, last, [posting("req_1")])
    assert await watched.looks() == (1, 0)


async def test_a_journal_of_a_gateway_that_answers_is_its_own_matter(watched: Watched) -> None:
    await watched.left_by_a_dead_gateway(3)
    assert await watched.looks() == (1, 0)
    server = await asyncio.start_unix_server(lambda reader, writer: writer.close(), watched.run_dir / "gateway-3.sock")
    assert await watched.looks() == (0, 0)
    server.close()
    await server.wait_closed()
    assert await watched.looks() == (1, 0), "the socket of a dead process is still there"


async def test_a_journal_that_changes_has_an_owner(watched: Watched) -> None:
    journal = await open_journal(watched.state / "gateway-3" / "journal", 3)
    for number in range(3):
        await journal.end(posting(f"req_{number}"))
        assert await watched.looks(1) == (0, 0)
    await journal.close()
    assert await watched.looks() == (1, 0)


async def test_damaged_segments_of_gateways_and_workers_are_counted(watched: Watched) -> None:
    for slot in ("gateway-0", "worker-1"):
        directory = watched.state / slot / "journal"
        directory.mkdir(parents=True)
        (directory / "00000000000000000001.journal.quarantined").touch()
    assert await watched.looks() == (0, 2)
