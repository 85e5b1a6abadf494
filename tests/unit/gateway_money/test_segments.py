from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from gateway.journal import journal_records
from gateway.journal.journal import open_journal
from gateway.journal.reader import Reader
from workers.protocol.journal import Kind, segment_name
from workers.protocol.segments import drop_old, list_segments, recover

ALL = 1 << 60


async def write(directory: Path, opened, num_requests: int, segment_bytes: int = 1 << 20) -> None:
    journal = await open_journal(directory, 0, segment_bytes=segment_bytes)
    for n in range(num_requests):
        await journal.open(opened(n))
        await journal.end(opened(n).void("internal", "internal", 1))
    await journal.close()


def seqs(directory: Path, after: int = 0) -> list[int]:
    return [record.seq for record in Reader(directory, after).read(ALL, 100_000)]


async def test_reading_goes_on_from_any_record_through_all_segments(tmp_path: Path, opened) -> None:
    await write(tmp_path, opened, 40, segment_bytes=3000)
    last = seqs(tmp_path)[-1]
    assert len(list_segments(tmp_path)) > 3
    for after in range(0, last + 1, 7):
        assert seqs(tmp_path, after) == list(range(after + 1, last + 1))


async def test_nothing_beyond_the_durable_record_is_read(tmp_path: Path, opened) -> None:
    await write(tmp_path, opened, 10)
    reader = Reader(tmp_path, 0)
    assert [r.seq for r in reader.read(5, 100)] == [1, 2, 3, 4, 5]
    assert [r.seq for r in reader.read(5, 100)] == []
    assert [r.seq for r in reader.read(8, 2)] == [6, 7]
    assert reader.read(8, 100)[0].seq == 8


async def test_a_reader_follows_a_writer(tmp_path: Path, opened) -> None:
    journal = await open_journal(tmp_path, 0, segment_bytes=1500)
    reader, found = Reader(tmp_path, 0), []
    for n in range(25):
        await journal.open(opened(n))
        await journal.end(opened(n).void("internal", "internal", 1))
        found += reader.read(journal.durable_seq, 1000)
    await journal.close()
    found += reader.read(journal.durable_seq, 1000)
    assert [r.seq for r in found] == list(range(1, journal.durable_seq + 1))


@pytest.mark.parametrize("num_missing", [1, 100, 700])
async def test_a_segment_that_ends_between_a_read_and_the_look_for_the_next_is_read_whole(
    tmp_path: Path, opened, num_missing: int
) -> None:
    """The writer ends a segment and begins the next while the reader is between its two steps. What it wrote last was
    passed over, and those charges never came to SQL.
    """
    whole, seen = tmp_path / "whole", tmp_path / "seen"
    await write(whole, opened, 8, segment_bytes=3000)
    first, second = list_segments(whole)[:2]
    data = first.path.read_bytes()
    seen.mkdir()
    (seen / first.path.name).write_bytes(data[:-num_missing])

    class Slow(Reader):
        def _successor(self):
            (seen / first.path.name).write_bytes(data)
            shutil.copy(second.path, seen)
            return super()._successor()

    found = [record.seq for record in Slow(seen, 0).read(ALL, 1000)]
    assert found[-1] > second.first_seq
    assert found == list(range(1, found[-1] + 1))


async def test_a_journal_cut_at_every_byte_of_its_last_records_keeps_the_records_before(
    tmp_path: Path, opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)  # thousands of them prove nothing here
    whole = tmp_path / "whole"
    await write(whole, opened, 3)
    [segment] = list_segments(whole)
    data = segment.path.read_bytes()
    all_seqs = seqs(whole)
    ends = _ends(data)
    for length in range(ends[-3], len(data)):
        copy = tmp_path / "cut"
        copy.mkdir()
        (copy / segment.path.name).write_bytes(data[:length])
        num_whole = sum(end <= length for end in ends)
        left = recover(copy)
        assert [r.seq for r in left.records] == all_seqs[:num_whole]
        assert left.chain.next_seq == num_whole + 1
        if length % 64 == 0 or length in ends:
            again = await open_journal(copy, 0, sync=lambda _: None)
            await again.close()
            read = Reader(copy, 0).read(ALL, 1000)
            assert [r.seq for r in read] == list(range(1, read[-1].seq + 1))
            assert _unended(read) == set()
        shutil.rmtree(copy)


@pytest.mark.parametrize("torn", [b"", b"\0" * 4096, b"\x00\x00\x01"], ids=["empty", "zeros", "torn"])
@pytest.mark.parametrize("num_requests", [0, 3])
async def test_a_segment_that_was_begun_and_never_written_is_begun_again(
    tmp_path: Path, opened, torn: bytes, num_requests: int
) -> None:
    """Killed between a segment's creation and its first whole record."""
    first = 1
    if num_requests:
        await write(tmp_path, opened, num_requests)
        first = recover(tmp_path).chain.next_seq
    (tmp_path / segment_name(first)).write_bytes(torn)
    await write(tmp_path, opened, 1)
    read = Reader(tmp_path, 0).read(ALL, 1000)
    assert [r.seq for r in read] == list(range(1, read[-1].seq + 1))
    ended = [r for r in read if r.kind == Kind.VOID]
    assert len(ended) == num_requests + 1


def _ends(data: bytes) -> list[int]:
    ends, at = [], 0
    while at < len(data):
        at += 8 + int.from_bytes(data[at : at + 4])
        ends.append(at)
    return ends


def _unended(records) -> set[str]:
    running: set[str] = set()
    for record in records:
        if record.kind == Kind.OPEN:
            running.add(journal_records.opened(record.payload).request_id)
        elif record.kind in (Kind.SETTLE, Kind.VOID):
            running.discard(journal_records.posting(record.payload).request_id)
    return running


async def test_damage_before_the_tail_quarantines_the_segment_with_an_alarm(
    tmp_path: Path, opened, caplog: pytest.LogCaptureFixture
) -> None:
    await write(tmp_path, opened, 10)
    [segment] = list_segments(tmp_path)
    data = bytearray(segment.path.read_bytes())
    ends = _ends(bytes(data))
    data[ends[8] + 40] ^= 1  # in record 10
    segment.path.write_bytes(data)
    with caplog.at_level(logging.CRITICAL):
        left = recover(tmp_path)
    assert [r.seq for r in left.records] == list(range(1, 10))
    assert "damaged before its tail" in caplog.text
    kept = segment.path.with_name(segment.path.name + ".quarantined")
    assert kept.read_bytes() == data
    assert segment.path.read_bytes() == data[: ends[8]]


async def test_a_reader_goes_past_a_damaged_segment_with_an_alarm(
    tmp_path: Path, opened, caplog: pytest.LogCaptureFixture
) -> None:
    await write(tmp_path, opened, 40, segment_bytes=3000)
    segments = list_segments(tmp_path)
    damaged = segments[1]
    data = bytearray(damaged.path.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.path.write_bytes(data)
    last = segments[-1].first_seq
    with caplog.at_level(logging.CRITICAL):
        found = seqs(tmp_path)
    assert "damaged before its tail" in caplog.text
    assert "are missing" in caplog.text
    missing = set(range(1, found[-1] + 1)) - set(found)
    assert missing
    assert all(damaged.first_seq < seq < segments[2].first_seq for seq in missing)
    assert found[-1] > last


async def test_segments_go_a_week_after_they_were_shipped(tmp_path: Path, opened) -> None:
    await write(tmp_path, opened, 40, segment_bytes=3000)
    segments = list_segments(tmp_path)
    now = segments[0].path.stat().st_mtime
    week = 7 * 24 * 3600
    assert drop_old(tmp_path, ALL, now + week - 60) == 0
    assert drop_old(tmp_path, segments[1].first_seq - 2, now + week + 60) == 0
    assert drop_old(tmp_path, segments[2].first_seq - 1, now + week + 60) == 2
    assert list_segments(tmp_path)[0].first_seq == segments[2].first_seq
    assert drop_old(tmp_path, ALL, now + week + 60) == len(segments) - 3  # the last is being written


async def test_an_unreadable_directory_is_an_error_and_not_an_empty_journal(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        recover(tmp_path / "missing")
    assert not os.listdir(tmp_path)
