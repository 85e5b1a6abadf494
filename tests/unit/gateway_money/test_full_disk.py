"""F11: a disk that is full lets running requests end, lets none in, and is itself again within 5 s of having room."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from disks import CountedDisk, fill, mounted
from load import stretched

from gateway.journal.journal import Journal, JournalPoisoned, open_journal
from gateway.journal.journal_records import posting
from gateway.journal.reader import Reader
from gateway.metering.metering import _revive
from workers.protocol.ballast import NAME
from workers.protocol.journal import Kind
from workers.protocol.segments import list_segments

DISK_BYTES = 4 * 1024 * 1024
BALLAST = 1024 * 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 4 MiB."""
    with mounted(tmp_path / "disk", DISK_BYTES) as disk:
        yield disk


async def until_poisoned(journal: Journal, opened) -> int:
    """How many requests were opened before the disk took no more; the last one is not."""
    for number in range(1, 100_000):
        try:
            await journal.open(opened(number))
        except JournalPoisoned:
            return number - 1
    raise AssertionError("the disk takes everything")


async def test_what_runs_ends_nothing_is_let_in_and_space_heals(
    small_disk: Path, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.metering.metering.REVIVE_EVERY_S", 0.1)
    journal = await open_journal(small_disk / "journal", 0, ballast_bytes=BALLAST)
    reviver = asyncio.create_task(_revive(journal))
    theirs = fill(small_disk)
    num_opened = await until_poisoned(journal, opened)
    assert num_opened > 0
    async with asyncio.timeout(stretched(5)):
        while True:
            try:
                await journal.end(opened(1).void("internal", "internal", 1))
                break
            except JournalPoisoned:
                await asyncio.sleep(0.05)
    assert not journal.is_writable, "the ballast is gone, so nobody is let in"
    assert not (small_disk / "journal" / NAME).exists()
    await asyncio.gather(*(journal.end(opened(n).void("ok", "internal", 1)) for n in range(2, num_opened + 1)))
    await asyncio.sleep(0.5)
    assert not journal.is_writable

    theirs.unlink()
    began = time.monotonic()
    while not journal.is_writable:
        assert time.monotonic() - began < stretched(5)
        await asyncio.sleep(0.05)
    await journal.open(opened(num_opened + 2))
    reviver.cancel()
    await asyncio.gather(reviver, return_exceptions=True)
    await journal.close()
    reader = Reader(small_disk / "journal", 0)
    ended = [
        posting(record.payload).request_id
        for record in reader.read(journal.durable_seq, 10**6)
        if record.kind == Kind.VOID
    ]
    assert len(set(ended)) == len(ended) == num_opened


async def test_a_disk_that_stays_full_is_not_littered_with_beginnings(small_disk: Path, opened) -> None:
    journal = await open_journal(small_disk / "journal", 0, ballast_bytes=BALLAST)
    fill(small_disk)
    await until_poisoned(journal, opened)
    (small_disk / "journal" / NAME).unlink()
    theirs = fill(small_disk)
    before = len(list_segments(small_disk / "journal"))
    for _ in range(3):
        assert await journal.revive() is False
    assert len(list_segments(small_disk / "journal")) == before
    theirs.unlink()
    assert await journal.revive() is True
    await journal.close()


async def test_a_sync_that_waits_as_the_disk_fills_does_not_end_the_syncer(
    small_disk: Path, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It woke to a file that was closed meanwhile. Its thread ended, and later endings waited for it for ever."""
    monkeypatch.setattr("gateway.journal.journal.OPEN_SYNC_S", 0.3)
    journal = await open_journal(small_disk / "journal", 0, ballast_bytes=BALLAST)
    fill(small_disk)
    await until_poisoned(journal, opened)
    (small_disk / "journal" / NAME).unlink()
    theirs = fill(small_disk)
    assert await journal.revive() is False
    await asyncio.sleep(0.5)
    theirs.unlink()
    assert await journal.revive() is True
    async with asyncio.timeout(stretched(10)):
        await journal.end(opened(1).void("ok", "internal", 1))
    await journal.close()


async def test_a_disk_that_is_full_and_then_read_only_does_not_end_the_reviver(
    tmp_path: Path, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ballast's file could not be removed, and nothing was admitted until the gateway was started again."""
    monkeypatch.setattr("gateway.metering.metering.REVIVE_EVERY_S", 0.01)
    journal = await open_journal(tmp_path / "journal", 0, ballast_bytes=BALLAST)
    with monkeypatch.context() as broken:
        disk = CountedDisk(tmp_path, broken)
        disk.room, disk.is_read_only = 0, True
        journal._log.ballast.is_held = False
        reviver = asyncio.create_task(_revive(journal))
        await asyncio.sleep(0.1)
        assert not reviver.done()
        assert not journal.is_writable
    async with asyncio.timeout(stretched(5)):
        while not journal.is_writable:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    reviver.cancel()
    await journal.close()


async def test_a_revival_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.metering.metering.REVIVE_EVERY_S", 0.0)
    tried = asyncio.Semaphore(0)

    async def revive() -> bool:
        tried.release()
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    reviver = asyncio.create_task(_revive(SimpleNamespace(revive=revive)))
    async with asyncio.timeout(stretched(5)):
        for _ in range(3):
            await tried.acquire()
    reviver.cancel()
