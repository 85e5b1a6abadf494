"""I14: every ending that a journal says was shipped is in the ledger, as it was written."""

from __future__ import annotations

import asyncio

from sqlalchemy import text

from accounting.database import migrate
from accounting.database.db import Database
from gateway.base.app_keys import DATABASE
from gateway.journal.journal_truth import shipped_whole


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
    await asyncio.to_thread(migrate.upgrade, url)
    lost = Database(url)
    async with lost.write() as conn:
        await conn.execute(text(f"INSERT INTO journal_offset VALUES (0, {offset}, 1)"))
        assert len((await shipped_whole(conn, journals)).failures) == 1
        await conn.execute(text('UPDATE journal_offset SET "offset" = "offset" + 1000000'))
        assert any("was shipped" in name for name in (await shipped_whole(conn, journals)).failures)
    await lost.close()
