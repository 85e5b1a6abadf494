"""Bytes at rest: any range comes back, and nothing but what was written where it was written."""

from __future__ import annotations

import hashlib
import os
import random
import resource
from pathlib import Path

import pytest

from accounting.batches.file_store import PART_BYTES, FileStore, Writer
from accounting.database.sealing import SealBroken, seal, unseal

KEY, OTHER = b"k" * 32, b"o" * 32
CONTENT = random.Random(1).randbytes(2 * PART_BYTES + 1234)


def written(store: FileStore, content: bytes = CONTENT) -> Writer:
    writer = store.create(KEY)
    for start in range(0, len(content), 7777):
        writer.write(content[start : start + 7777])
    assert writer.finish() == hashlib.sha256(content).hexdigest()
    assert writer.num_bytes == len(content)
    return writer


@pytest.mark.parametrize("num_bytes", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, len(CONTENT)])
def test_the_whole_and_any_range_come_back(tmp_path: Path, num_bytes: int):
    content = CONTENT[:num_bytes]
    store = FileStore(tmp_path)
    reader = store.open(written(store, content).storage_key, KEY)
    assert b"".join(reader.parts()) == content
    for offset, length in ((0, 10), (PART_BYTES - 3, 6), (num_bytes - 1, 5), (num_bytes, 5), (5, 10**6)):
        if offset >= 0:
            assert reader.read(offset, length) == content[offset : offset + length]
    reader.close()


def test_an_unfinished_file_is_not_there(tmp_path: Path):
    store = FileStore(tmp_path)
    writer = store.create(KEY)
    writer.write(CONTENT)
    with pytest.raises(FileNotFoundError):
        store.open(writer.storage_key, KEY)
    writer.abort()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("room", [80_000, PART_BYTES + 100, 2 * PART_BYTES + 500])
def test_a_disk_that_takes_less_than_all_fails_the_file(tmp_path: Path, room: int):
    """A write may then take a part of the bytes without an error. The file had a right hash and could not be read."""
    store = FileStore(tmp_path)
    writer = store.create(KEY)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            _write_to_the_end(writer)
        writer.abort()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def _write_to_the_end(writer: Writer) -> None:
    writer.write(CONTENT)
    writer.finish()


def test_what_a_killed_process_left_is_dropped_and_what_is_being_written_is_not(tmp_path: Path):
    store = FileStore(tmp_path)
    left, present = store.create(KEY), store.create(KEY)
    os.utime(tmp_path / "unfinished" / left.storage_key, (1, 1))
    store.drop_unfinished(older_than=100)
    assert [p.name for p in (tmp_path / "unfinished").iterdir()] == [present.storage_key]
    left.abort()
    present.abort()


def test_another_key_a_changed_bit_or_a_moved_part_is_noticed(tmp_path: Path):
    store = FileStore(tmp_path)
    one = written(store)
    with pytest.raises(SealBroken):
        read_all(store, one.storage_key, OTHER)
    path = tmp_path / one.storage_key
    sealed = path.read_bytes()
    part = PART_BYTES + 28
    for damaged in (
        sealed[:100] + bytes([sealed[100] ^ 1]) + sealed[101:],
        sealed[part : 2 * part] + sealed[:part] + sealed[2 * part :],
        sealed[:-1],
        sealed[: 2 * part],
        sealed[:part],
        b"",
    ):
        path.write_bytes(damaged)
        with pytest.raises(SealBroken):
            read_all(store, one.storage_key, KEY)
    path.write_bytes(sealed)
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(SealBroken):
        read_all(store, "elsewhere", KEY)


def test_a_sealed_text_opens_in_its_place_only():
    sealed = seal(KEY, b"text", b"here")
    assert unseal(KEY, sealed, b"here") == b"text"
    assert seal(KEY, b"text", b"here") != sealed
    for key, value, place in ((OTHER, sealed, b"here"), (KEY, sealed, b"there"), (KEY, sealed[:5], b"here")):
        with pytest.raises(SealBroken):
            unseal(key, value, place)


def read_all(store: FileStore, storage_key: str, key: bytes) -> bytes:
    reader = store.open(storage_key, key)
    try:
        return b"".join(reader.parts())
    finally:
        reader.close()


def test_an_unfinished_file_that_cannot_be_deleted_keeps_no_other_from_it(tmp_path: Path, monkeypatch, caplog):
    store = FileStore(tmp_path)
    names = ["a", "b", "c", "d"]
    (tmp_path / "unfinished").mkdir()
    for name in names:
        (tmp_path / "unfinished" / name).touch()
        os.utime(tmp_path / "unfinished" / name, (50, 50))
    unlink, stat = Path.unlink, Path.stat

    def failing_unlink(self: Path, *args, **options):
        if self.name == names[0]:
            raise PermissionError(13, "Permission denied")
        return unlink(self, *args, **options)

    def failing_stat(self: Path, *args, **options):
        if self.name == names[1]:
            raise OSError(5, "Input/output error")
        if self.name == names[2]:  # its writer has finished it meanwhile
            raise FileNotFoundError(2, "No such file or directory")
        return stat(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing_unlink)
        patch.setattr(Path, "stat", failing_stat)
        store.drop_unfinished(older_than=100)
    assert {path.name for path in (tmp_path / "unfinished").iterdir()} == set(names[:3])
    assert sorted(record.file for record in caplog.records) == sorted(names[:2])
