"""The journal as one process sees it; kills are in tests/integration, files in test_segments.py."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
import time
from pathlib import Path

import pytest
from load import stretched

from gateway.journal import journal_records
from gateway.journal.journal import Journal, JournalPoisoned, open_journal
from gateway.journal.reader import Reader
from workers.protocol.journal import Kind
from workers.protocol.segments import SlotTaken, list_segments, recover


def kinds(directory: Path) -> list[Kind]:
    reader = Reader(directory, 0)
    return [Kind(record.kind) for record in reader.read(1 << 60, 100_000)]


async def test_a_record_is_on_the_disk_when_its_end_returns(tmp_path: Path, opened) -> None:
    synced: list[float] = []

    def sync(descriptor: int) -> None:
        os.fdatasync(descriptor)
        synced.append(time.monotonic())

    journal = await open_journal(tmp_path, 0, sync=sync)
    before = journal.durable_seq
    started = time.monotonic()
    await journal.open(opened(1))
    await journal.end(opened(1).void("internal", "internal", 1))
    assert synced[-1] >= started
    assert journal.durable_seq == before + 2
    await journal.close()
    assert kinds(tmp_path) == [Kind.HEADER, Kind.SEAL, Kind.OPEN, Kind.VOID, Kind.SEAL]


async def test_an_open_returns_while_a_sync_is_under_way(tmp_path: Path, opened) -> None:
    """A slow disk delays the end of replies, never their beginning."""
    may_go = threading.Event()
    may_go.set()

    def sync(descriptor: int) -> None:
        may_go.wait(10)
        os.fdatasync(descriptor)

    journal = await open_journal(tmp_path, 0, sync=sync)
    may_go.clear()
    ending = asyncio.create_task(journal.end(opened(1).void("internal", "internal", 1)))
    await asyncio.sleep(0.05)
    await asyncio.wait_for(journal.open(opened(2)), stretched(1))
    assert not ending.done()
    may_go.set()
    await ending
    await journal.close()


async def test_what_arrives_during_a_sync_goes_together_with_the_next(tmp_path: Path, opened) -> None:
    num_syncs = 0
    may_go = threading.Event()
    may_go.set()

    def sync(descriptor: int) -> None:
        nonlocal num_syncs
        num_syncs += 1
        may_go.wait(10)

    journal = await open_journal(tmp_path, 0, sync=sync)
    num_syncs = 0
    may_go.clear()
    voids = [opened(n).void("internal", "internal", 1) for n in range(200)]
    ending = [asyncio.create_task(journal.end(void)) for void in voids]
    await asyncio.sleep(0.05)
    may_go.set()
    await asyncio.gather(*ending)
    assert num_syncs <= 3
    await journal.close()


async def test_an_open_alone_reaches_the_disk_within_milliseconds(tmp_path: Path, opened) -> None:
    journal = await open_journal(tmp_path, 0)
    await journal.open(opened(1))
    seq = journal._log.chain.next_seq - 1
    deadline = time.monotonic() + stretched(0.5)
    while journal.durable_seq < seq and time.monotonic() < deadline:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.001)
    assert journal.durable_seq == seq
    await journal.close()


async def test_opens_that_keep_coming_reach_the_disk_without_an_ending(tmp_path: Path, opened) -> None:
    journal = await open_journal(tmp_path, 0)
    behind = 0
    for number in range(100):
        await journal.open(opened(number))
        await asyncio.sleep(0.002)
        behind = max(behind, journal._log.chain.next_seq - 1 - journal.durable_seq)
    assert behind < 50
    await journal.close()


async def test_a_slot_has_one_owner(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path, 0)
    with pytest.raises(SlotTaken):
        await open_journal(tmp_path, 0)
    await journal.close()
    await (await open_journal(tmp_path, 0)).close()


async def test_segments_are_private_to_their_user(tmp_path: Path) -> None:
    journal = await open_journal(tmp_path / "journal", 0)
    await journal.close()
    [segment] = list_segments(tmp_path / "journal")
    assert stat.S_IMODE(segment.path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o700


async def test_a_full_segment_is_sealed_and_the_next_takes_over_what_runs(tmp_path: Path, opened) -> None:
    journal = await open_journal(tmp_path, 0, segment_bytes=2000)
    for n in range(30):
        await journal.open(opened(n))
        if n != 7:
            await journal.end(opened(n).void("internal", "internal", 1))
    num_segments = len(list_segments(tmp_path))
    assert num_segments >= 3
    await journal.close()
    last = list_segments(tmp_path)[-1].path.read_bytes()
    assert opened(7).request_id.encode() in last
    again = await open_journal(tmp_path, 0)
    assert journal_records.posting(recover(tmp_path).records[-1].payload).request_id == "req_00000007"
    await again.close()


async def test_whoever_restarts_voids_what_the_dead_process_left_open(tmp_path: Path, opened) -> None:
    journal = await open_journal(tmp_path, 0)
    for n in range(3):
        await journal.open(opened(n))
    await journal.end(opened(1).void("internal", "internal", 1))
    await journal.close()  # as good as dead: it leaves 0 and 2 open
    again = await open_journal(tmp_path, 0)
    await again.close()
    ends = [
        journal_records.posting(record.payload)
        for record in Reader(tmp_path, 0).read(1 << 60, 1000)
        if record.kind == Kind.VOID
    ]
    assert [(end.request_id[-1], end.outcome) for end in ends] == [
        ("1", "internal"),
        ("0", "gateway_crash"),
        ("2", "gateway_crash"),
    ]
    third = await open_journal(tmp_path, 0)
    await third.close()
    assert kinds(tmp_path).count(Kind.VOID) == 3


async def test_a_journal_lost_with_its_disk_does_not_number_anew(tmp_path: Path, opened) -> None:
    journal = await open_journal(tmp_path, 0, min_next_seq=5001)
    await journal.open(opened(1))
    await journal.close()
    assert list_segments(tmp_path)[0].first_seq == 5001


@pytest.mark.parametrize("fault", [errno.EIO, errno.ENOSPC])
async def test_a_failed_sync_poisons_the_journal_and_is_not_repeated(tmp_path: Path, opened, fault: int) -> None:
    num_failures = 0
    broken = False

    def sync(descriptor: int) -> None:
        nonlocal num_failures
        if broken:
            num_failures += 1
            raise OSError(fault, os.strerror(fault))
        os.fdatasync(descriptor)

    journal = await open_journal(tmp_path, 0, sync=sync)
    await journal.open(opened(1))
    await asyncio.sleep(0.05)
    broken = True
    with pytest.raises(JournalPoisoned):
        await journal.end(opened(1).void("internal", "internal", 1))
    assert not journal.is_writable
    with pytest.raises(JournalPoisoned):
        await journal.open(opened(2))
    await asyncio.sleep(0.05)
    assert num_failures == 1
    assert await journal.revive() is False
    broken = False
    assert await journal.revive() is True
    assert journal.is_writable
    await journal.end(opened(1).void("drain", "drain", 2))
    await journal.close()
    assert kinds(tmp_path)[-2:] == [Kind.VOID, Kind.SEAL]


async def test_a_process_without_a_free_descriptor_leaves_no_ending_waiting(
    tmp_path: Path, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The syncer's thread ended with the first one that it did not get. Endings waited for it for ever."""
    has_none, duplicate = False, os.dup

    def dup(descriptor: int) -> int:
        if has_none:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return duplicate(descriptor)

    monkeypatch.setattr(os, "dup", dup)
    journal = await open_journal(tmp_path, 0)
    has_none = True
    async with asyncio.timeout(stretched(5)):
        with pytest.raises(JournalPoisoned):
            await journal.end(opened(1).void("internal", "internal", 1))
    assert not journal.is_writable
    has_none = False
    assert await journal.revive() is True
    async with asyncio.timeout(stretched(5)):
        await journal.end(opened(1).void("drain", "drain", 2))
    await journal.close()


@pytest.mark.parametrize("thread", ["journal-writer", "journal-syncer"])
async def test_a_fault_of_ours_ends_no_thread_of_the_journal(
    tmp_path: Path, opened, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    fails, write = False, os.write

    def fault() -> None:
        if fails and threading.current_thread().name == thread:
            raise MemoryError

    def sync(descriptor: int) -> None:
        fault()
        os.fdatasync(descriptor)

    def write_or_fail(descriptor: int, data) -> int:
        fault()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", write_or_fail)
    journal = await open_journal(tmp_path, 0, sync=sync)
    fails = True
    async with asyncio.timeout(stretched(5)):
        with pytest.raises(JournalPoisoned):
            await journal.end(opened(1).void("internal", "internal", 1))
    assert not journal.is_writable
    fails = False
    assert await journal.revive() is True
    async with asyncio.timeout(stretched(5)):
        await journal.end(opened(1).void("drain", "drain", 2))
    await journal.close()


async def test_a_caller_that_is_cancelled_does_not_stop_its_record(tmp_path: Path, opened) -> None:
    journal = await open_journal(tmp_path, 0)
    await journal.open(opened(1))
    ending = asyncio.create_task(journal.end(opened(1).void("internal", "internal", 1)))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    await journal.close()
    assert Kind.VOID in kinds(tmp_path)


async def test_a_new_segment_begins_in_no_write_of_the_old_one(tmp_path: Path, opened, monkeypatch) -> None:
    """Its endings were told durable, and the rest of a record that had begun in the old segment stood in the new one."""
    write, halfway, go_on, stalls = os.write, threading.Event(), threading.Event(), False
    fails, may_fail = threading.Event(), threading.Event()

    def write_a_part(descriptor: int, data) -> int:
        if stalls and threading.current_thread().name == "journal-writer":
            num_written = write(descriptor, bytes(data)[:10])
            halfway.set()
            go_on.wait(10)
            return num_written
        return write(descriptor, data)

    def sync(descriptor: int) -> None:
        if fails.is_set() and threading.current_thread().name == "journal-syncer":
            may_fail.wait(10)
            fails.clear()
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        os.fdatasync(descriptor)

    monkeypatch.setattr(os, "write", write_a_part)
    journal = await open_journal(tmp_path, 0, sync=sync)
    await asyncio.gather(journal.open(opened(1)), journal.open(opened(2)))
    await asyncio.sleep(0.05)
    fails.set()
    first = asyncio.create_task(journal.end(opened(1).void("internal", "internal", 1)))
    await asyncio.sleep(0.05)
    stalls = True
    second = asyncio.create_task(journal.end(opened(2).void("internal", "internal", 1)))
    await asyncio.to_thread(halfway.wait, 10)
    stalls = False
    may_fail.set()
    with pytest.raises(JournalPoisoned):
        await first
    reviving = asyncio.create_task(journal.revive())
    await asyncio.sleep(0.05)
    go_on.set()
    with pytest.raises(JournalPoisoned):
        await second
    assert await reviving
    await journal.end(opened(2).void("drain", "drain", 2))
    await journal.close()
    left = recover(tmp_path)
    assert not left.is_damaged
    assert [Kind(record.kind) for record in left.records][-2:] == [Kind.VOID, Kind.SEAL]
    assert [Kind(record.kind) for record in left.records].count(Kind.OPEN) == 1  # of the second, which had not ended


async def test_a_journal_that_cannot_seal_frees_its_slot(tmp_path: Path, opened) -> None:
    is_full = False

    def sync(descriptor: int) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(descriptor)

    journal = await open_journal(tmp_path, 0, sync=sync, ballast_bytes=1 << 20)
    is_full = True
    await journal.close()
    assert not (tmp_path / "ballast").exists()
    is_full = False
    await (await open_journal(tmp_path, 0, sync=sync)).close()


async def test_endings_before_a_rotation_that_finds_no_room_are_told(
    tmp_path: Path, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rotation has synced them. The syncer finds no open segment then, and still serves the next one."""
    may_go, is_full = threading.Event(), False
    open_file, poison = os.open, Journal._poison

    def sync(descriptor: int) -> None:
        if threading.current_thread().name == "journal-syncer":
            may_go.wait(10)
        os.fdatasync(descriptor)

    def open_if_there_is_room(path, *args, **kwargs) -> int:
        if is_full and str(path).endswith(".journal"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return open_file(path, *args, **kwargs)

    def poison_late(*args) -> None:
        may_go.set()
        time.sleep(0.2)
        poison(*args)

    monkeypatch.setattr(os, "open", open_if_there_is_room)
    monkeypatch.setattr(Journal, "_poison", poison_late)
    journal = await open_journal(tmp_path, 0, sync=sync)
    voids = [opened(n).void("internal", "internal", 1) for n in range(4)]
    first = asyncio.create_task(journal.end(voids[0]))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(journal.end(voids[1]))
    await asyncio.sleep(0.05)
    journal._segment_bytes, is_full = 1, True
    with pytest.raises(JournalPoisoned):
        await journal.end(voids[2])
    async with asyncio.timeout(stretched(5)):
        await first
        await second
    is_full = False
    assert await journal.revive()
    async with asyncio.timeout(stretched(5)):
        await journal.end(voids[3])
    await journal.close()
    assert kinds(tmp_path).count(Kind.VOID) == 3
