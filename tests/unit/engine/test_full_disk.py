"""B2: on a full disk a worker's running requests end and are recorded, nothing is let in, and it heals by itself."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import CountedDisk, fill, mounted
from engine_driver import Driver
from fakes import ROOT, ScriptedRunner, encode, generate_request

from workers.engine.journal.journal import LOOK_EVERY_S, EngineJournal
from workers.engine.values.errors import CannotStartYet
from workers.protocol.ballast import NAME
from workers.protocol.journal import parse_segment_name

BALLAST = 1024 * 1024
PROMPT = encode("a prompt that fills a few blocks")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now

    def pass_look(self) -> None:
        self.now += LOOK_EVERY_S


@pytest.fixture
def clock() -> Clock:
    return Clock()


def opened(directory: Path, clock: Callable[[], float], ballast: int = BALLAST) -> EngineJournal:
    return EngineJournal(directory, "worker-0", "p", ROOT, ballast_bytes=ballast, clock=clock)


def driver(journal: EngineJournal) -> Driver:
    runner = ScriptedRunner(num_blocks=256, block_size=4)
    return Driver(runner, journal=journal, max_batch_tokens=64)


def drop(journal: EngineJournal) -> None:
    """As SIGKILL."""
    os.close(journal._log.file)
    os.close(journal._log.lock)


def begin(journal: EngineJournal, *names: str, max_tokens: int = 150) -> Driver:
    drive = driver(journal)
    drive.send(*[generate_request(name, PROMPT, max_tokens) for name in names])
    for _ in range(5):
        drive.step()
    assert len(drive.engine.attempts) == len(names)
    return drive


def usages(records) -> dict[str, object]:
    return {record.request_id: record.usage for record in records}


def check_that_a_full_disk_heals(directory: Path, clock: Clock, fill: Callable, free: Callable):
    journal = opened(directory, clock)
    drive = begin(journal, "a", "b")
    fill()
    drive.run()
    told = {request: ending for (_, request), ending in drive.endings.items()}
    assert {request: ending.reason for request, ending in told.items()} == {"a": "length", "b": "length"}
    assert usages(journal.unacked) == {request: end.usage for request, end in told.items()}
    assert drive.step().status.disk_full
    drive.send(generate_request("late", PROMPT, 3))
    drive.run()
    refused = drive.endings[next(key for key in drive.endings if key[1] == "late")]
    assert refused.code == "disk_full"
    free()
    drive.step()
    clock.pass_look()
    drive.step()
    assert not drive.engine.step().status.disk_full
    drive.send(generate_request("again", PROMPT, 3))
    drive.run()
    drop(journal)
    records = opened(directory, clock).unacked
    assert [record.request_id for record in records] == ["a", "b", "again"]
    assert usages(records)["a"] == told["a"].usage


def test_b2_running_requests_end_on_a_full_disk(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = CountedDisk(tmp_path, monkeypatch)

    def fill_up() -> None:
        disk.room = 10  # a write that is cut short comes first

    def free() -> None:
        disk.room += 2**30

    check_that_a_full_disk_heals(tmp_path / "journal", clock, fill_up, free)


def test_b2_running_requests_end_on_a_real_full_disk(tmp_path: Path, clock: Clock) -> None:
    with mounted(tmp_path / "disk", 4 * BALLAST) as disk:
        theirs: list[Path] = []
        check_that_a_full_disk_heals(
            disk / "journal", clock, lambda: theirs.append(fill(disk)), lambda: [path.unlink() for path in theirs]
        )


def test_b2_what_no_room_is_left_for_is_kept_in_memory_until_there_is(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody else takes the ballast's room as well."""
    disk, directory = CountedDisk(tmp_path, monkeypatch), tmp_path / "journal"
    journal = opened(directory, clock, ballast=0)
    drive = begin(journal, "a", "b")
    disk.room = 10
    drive.run()
    ended = usages(journal.unacked)
    assert ended.keys() == {"a", "b"}
    for _ in range(3):
        clock.pass_look()
        drive.step()
    segments = [path for path in directory.iterdir() if parse_segment_name(path.name)]
    assert len(segments) == 1, "nothing is left of segments that could not begin"
    disk.room = 2**30
    clock.pass_look()
    drive.step()
    assert journal.is_writable
    drop(journal)
    assert usages(opened(directory, clock).unacked) == ended


def test_b2_numbers_told_while_the_disk_took_none_are_never_told_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, directory = CountedDisk(tmp_path, monkeypatch), tmp_path / "journal"
    journal = opened(directory, clock, ballast=0)
    drive = begin(journal, "a", "b")
    disk.room = 10
    drive.run()
    told = {record.seq for record in journal.unacked}
    drop(journal)
    disk.room = 2**30
    crashed = opened(directory, clock).unacked
    assert {record.request_id for record in crashed} == {"a", "b"}
    assert min(record.seq for record in crashed) > max(told)


def test_b2_a_worker_that_was_killed_with_its_ballast_numbers_on(tmp_path: Path, clock: Clock) -> None:
    journal = opened(tmp_path, clock)
    begin(journal, "a")
    before = journal._log.chain.next_seq
    drop(journal)
    assert opened(tmp_path, clock).unacked[0].seq < before + 100
    assert (tmp_path / NAME).stat().st_size == BALLAST


def test_b2_a_start_on_a_full_disk_is_one_sentence(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = CountedDisk(tmp_path, monkeypatch)
    disk.room = 0
    with pytest.raises(CannotStartYet, match=r"cannot be written: No space left on device\.$"):
        opened(tmp_path / "journal", clock)


def test_b2_a_disk_that_fails_otherwise_still_ends_the_engine(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path / "journal", clock)
    drive = begin(journal, "a")

    def fails(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "write", fails)
    with pytest.raises(OSError, match="Input/output"):
        drive.step()
