"""One file that cannot be deleted ends neither the sweep nor what comes after it. No jobs process runs here."""

from __future__ import annotations

import time

import pytest
from sqlalchemy import select

from accounting.batches import files
from accounting.batches.file_store import FileStore
from accounting.tables.batch_models import File
from workers.jobs.base.settings import JobsSettings
from workers.jobs.batches.sweeper import Sweeper

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
