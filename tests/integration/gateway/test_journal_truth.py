"""I14: every ending that a journal says was shipped is in the ledger, as it was written."""

from __future__ import annotations

import asyncio
import time

from load import stretched
from migrated import migrated_database
from sqlalchemy import text

from accounting.database.db import Database
from gateway.base.app_keys import DATABASE
from gateway.journal.journal_truth import shipped_whole
from workers.protocol.journal import Chain, Kind, segment_name


async def test_a_large_segment_holds_up_no_request(sqlite_url, tmp_path):
    await migrated_database(sqlite_url)
    database, directory = Database(sqlite_url), tmp_path / "journal"
    directory.mkdir()
    chain, payload = Chain(), bytes(100)
    with (directory / segment_name(1)).open("wb") as file:
        for _ in range(100_000):
            file.write(chain.encode(Kind.COUNTS, payload))
    gaps = []

    async def tick() -> None:
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.001)
            gaps.append(time.monotonic() - began)

    ticking = asyncio.create_task(tick())
    async with database.read() as conn:
        assert not (await shipped_whole(conn, {0: directory})).failures
    ticking.cancel()
    await database.close()
    assert max(gaps) < stretched(0.2)


async def test_damage_in_a_segment_is_named_however_long_it_is(sqlite_url, tmp_path):
    await migrated_database(sqlite_url)
    database, directory = Database(sqlite_url), tmp_path / "journal"
    directory.mkdir()
    chain = Chain()
    data = b"".join(chain.encode(Kind.COUNTS, bytes(1000)) for _ in range(10_000))
    damaged = data[:4_000_000] + b"x" * 5_000_000 + data[9_000_000:]
    (directory / segment_name(1)).write_bytes(damaged)
    async with database.read() as conn:
        failures = (await shipped_whole(conn, {0: directory})).failures
    await database.close()
    assert failures == (f"slot 0: {segment_name(1)} is damaged",)


async def test_what_was_shipped_is_in_the_ledger_and_missed_where_it_is_not(gateway, tmp_path):
    async with gateway.client() as client:
        await client.completions.create(model="scripted", prompt="hello", max_tokens=4)
    await gateway.settled()
    journals = {0: gateway.settings.journal_dir}
    async with gateway.app[DATABASE].read() as conn:
        found = await shipped_whole(conn, journals)
        offset = await conn.scalar(text('SELECT max("offset") FROM journal_offset'))
    assert (found.num_checked, found.failures) == (1, ())
    # A ledger that knows the offset and not the row has lost it.
    url = f"sqlite+aiosqlite:///{tmp_path}/lost.db"
    await migrated_database(url)
    lost = Database(url)
    async with lost.write() as conn:
        await conn.execute(text(f"INSERT INTO journal_offset VALUES (0, {offset}, 1)"))
        assert len((await shipped_whole(conn, journals)).failures) == 1
        await conn.execute(text('UPDATE journal_offset SET "offset" = "offset" + 1000000'))
        assert any("was shipped" in name for name in (await shipped_whole(conn, journals)).failures)
    await lost.close()
