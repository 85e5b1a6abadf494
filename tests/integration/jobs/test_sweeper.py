"""The sweeper: no file, broker or other process ends a sweep or what comes after it. No jobs process runs here."""

from __future__ import annotations

import asyncio
import time

import pytest
from sqlalchemy import insert, select, update

from accounting.batches import claims, files
from accounting.batches.file_store import FileStore
from accounting.tables.batch_models import BatchChunk, BatchLine, File
from workers.jobs import __main__ as process
from workers.jobs.base.settings import JobsSettings
from workers.jobs.batches.sweeper import Sweeper, Swept

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_file_that_cannot_be_deleted_keeps_no_other_from_it(home, monkeypatch, caplog):
    ids = [await home.upload(b"x") for _ in range(3)]
    await home.submit(["say a"])
    async with home.database.write() as conn:
        for file_id in ids:
            await files.delete(conn, home.tenant_id, file_id, now=int(time.time()), actor="cli")
        keys = {row.id: row.storage_key for row in await conn.execute(select(File.id, File.storage_key))}
    delete = FileStore.delete

    def failing(self: FileStore, storage_key: str) -> None:
        if storage_key == keys[ids[0]]:
            raise PermissionError(13, "Permission denied")
        delete(self, storage_key)

    monkeypatch.setattr(FileStore, "delete", failing)
    settings = JobsSettings(home=home.path, url="http://127.0.0.1:9", broker_url="redis://")
    sweeper = Sweeper(settings, home.database)
    assert (await sweeper.sweep()).num_rings == 1
    assert all((home.path / "files" / keys[file_id]).exists() for file_id in ids), "rings come before the disk"
    await sweeper.purge_files()
    async with home.database.read() as conn:
        after = {row.id: row.storage_key for row in await conn.execute(select(File.id, File.storage_key))}
    assert after[ids[0]] == keys[ids[0]]
    assert after[ids[1]] is after[ids[2]] is None
    assert not (home.path / "files" / keys[ids[1]]).exists()
    assert [record.file for record in caplog.records if record.message == "file_not_deleted"] == [ids[0]]


async def test_many_files_that_cannot_be_deleted_keep_no_others(home, monkeypatch):
    """A hundred of them were the whole of each sweep."""
    ids = sorted([await home.upload(b"x") for _ in range(5)])
    async with home.database.write() as conn:
        for file_id in ids:
            await files.delete(conn, home.tenant_id, file_id, now=int(time.time()), actor="cli")
        keys = {row.id: row.storage_key for row in await conn.execute(select(File.id, File.storage_key))}
    delete, tried = FileStore.delete, []

    def failing(self: FileStore, storage_key: str) -> None:
        if storage_key in (keys[ids[0]], keys[ids[1]]):
            tried.append(storage_key)
            raise PermissionError(13, "Permission denied")
        delete(self, storage_key)

    monkeypatch.setattr(FileStore, "delete", failing)
    monkeypatch.setattr("workers.jobs.batches.sweeper.PURGED_PER_SWEEP", 2)
    settings = JobsSettings(home=home.path, url="http://127.0.0.1:9", broker_url="redis://")
    sweeper = Sweeper(settings, home.database)
    for _ in range(6):
        await sweeper.purge_files()
    async with home.database.read() as conn:
        left = [file_id for file_id, _ in await files.purgeable(conn, int(time.time()))]
    assert [file_id for file_id in ids if file_id in left] == ids[:2]
    assert len(tried) >= 4, "they are tried again, in their turn"


async def test_a_crash_is_counted_whichever_process_sweeps_first(home):
    """A sweep of another process put the claim back and counted nothing."""
    ours, theirs = (
        JobsSettings(home=home.path, url="http://127.0.0.1:9", broker_url="redis://", jobs_process=name)
        for name in ("one", "two")
    )
    batch_id = await home.submit(["say a"])
    async with home.database.write() as conn:
        over = await claims.now_ms(conn) - 1_000
        values = {"batch_id": batch_id, "seq": 0, "tenant_id": home.tenant_id, "predicted_tokens": 1, "num_lines": 1}
        claim = {"state": "claimed", "claimed_by": f"{ours.owner_prefix}7:x", "claimed_until_ms": over, "fence": 1}
        await conn.execute(insert(BatchChunk).values(**values, **claim, lines=b"", not_before_ms=0))
        await conn.execute(insert(BatchLine).values(batch_id=batch_id, line_no=1, chunk_seq=0, custom_id="a"))
    assert (await Sweeper(theirs, home.database).sweep()).num_expired == 0
    assert (await Sweeper(ours, home.database).sweep()).num_expired == 1
    async with home.database.write() as conn:
        assert await conn.scalar(select(BatchLine.crashes).where(BatchLine.batch_id == batch_id)) == 1
        late = over - 60_000
        await conn.execute(update(BatchChunk).values(state="claimed", claimed_until_ms=late))
    assert (await Sweeper(theirs, home.database).sweep()).num_expired == 1, "the other process may be dead"


async def test_claims_that_ran_out_while_sql_was_away_are_no_crashes(home, monkeypatch):
    """After three outages of a minute, lines that did nothing wrong were quarantined."""
    settings = JobsSettings(home=home.path, url="http://127.0.0.1:9", broker_url="redis://", jobs_process="three")
    batch_id = await home.submit(["say a"])
    sweeper, now_ms, later = Sweeper(settings, home.database), claims.now_ms, 0

    async def moved(conn) -> int:
        return await now_ms(conn) + later

    async def crashes_after_a_sweep() -> int:
        async with home.database.write() as conn:
            over = await moved(conn) - 1_000
            of_batch = update(BatchChunk).where(BatchChunk.batch_id == batch_id)
            await conn.execute(of_batch.values(state="claimed", claimed_until_ms=over))
        assert (await sweeper.sweep()).num_expired == 1
        async with home.database.read() as conn:
            return await conn.scalar(select(BatchLine.crashes).where(BatchLine.batch_id == batch_id))

    async with home.database.write() as conn:
        values = {"batch_id": batch_id, "seq": 0, "tenant_id": home.tenant_id, "predicted_tokens": 1, "num_lines": 1}
        await conn.execute(
            insert(BatchChunk).values(**values, claimed_by=f"{settings.owner_prefix}7:x", lines=b"", not_before_ms=0)
        )
        await conn.execute(insert(BatchLine).values(batch_id=batch_id, line_no=1, chunk_seq=0, custom_id="a"))
    monkeypatch.setattr(claims, "now_ms", moved)
    await sweeper.sweep()
    later += 45_000  # no sweep for three times as long as usual
    assert await crashes_after_a_sweep() == 0
    later += 15_000
    assert await crashes_after_a_sweep() == 1


async def test_a_broker_that_is_away_is_rung_once_in_a_sweep(home, monkeypatch):
    """Each ring may take ten seconds."""
    settings = JobsSettings(home=home.path, url="http://127.0.0.1:9", broker_url="redis://", jobs_pulse=home.path / "p")
    rings: list[None] = []

    async def sweep(_self: Sweeper) -> Swept:
        return Swept(0, 4, False)

    monkeypatch.setattr(Sweeper, "sweep", sweep)
    monkeypatch.setattr(process, "ring", lambda _app: bool(rings.append(None)))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await process.Jobs(settings)._sweep(home.database)
    assert len(rings) == 1
