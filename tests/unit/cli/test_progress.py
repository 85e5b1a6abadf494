"""The bar of long commands: on a terminal alone, never beside JSON, and nothing is done otherwise because of it."""

from __future__ import annotations

import io
import sqlite3
import sys
from pathlib import Path

import pytest

from accounting.database import copies, migrate
from accounting.values.progress import nobody
from gateway.cli import home_archive
from gateway.cli.home_archive import FORMAT, Manifest
from gateway.cli.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_share_and_end(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    with progress("Packing") as told:
        told(1, 4)
        told(3, 4)
    written = sys.stderr.getvalue()
    assert "Packing" in written
    assert "75%" in written
    assert "100%" in written


@pytest.mark.parametrize(("stream", "quiet"), [(io.StringIO(), False), (Terminal(), True)])
def test_nobody_else_sees_anything(monkeypatch, stream, quiet):
    monkeypatch.setattr(sys, "stderr", stream)
    with progress("Packing", quiet=quiet) as told:
        told(1, 4)
    assert told is nobody
    assert stream.getvalue() == ""


def test_a_migration_tells_of_each_step(tmp_path):
    heard: list[tuple[int, int]] = []
    url = f"sqlite+aiosqlite:///{tmp_path}/x.db"
    migrate.upgrade(url, told=lambda *numbers: heard.append(numbers))
    assert len(heard) > 5
    assert heard == [(number, len(heard)) for number in range(1, len(heard) + 1)]
    migrate.upgrade(url, told=lambda *numbers: heard.append(numbers))
    assert heard[-1][0] == heard[-1][1], "what is migrated already has no steps"


def test_a_copy_that_is_told_of_is_the_same_although_others_write(tmp_path):
    """It is made in parts from one snapshot. Without that, each write would begin it anew."""
    source, target = tmp_path / "x.db", tmp_path / "y.db"
    with sqlite3.connect(source) as conn:
        conn.execute("PRAGMA journal_mode=WAL")
        conn.execute("CREATE TABLE t (n INTEGER, filler BLOB)")
        conn.executemany("INSERT INTO t VALUES (?, zeroblob(4000))", [(n,) for n in range(3000)])
    heard: list[tuple[int, int]] = []

    def told(done: int, of: int) -> None:
        heard.append((done, of))
        conn.execute("INSERT INTO t VALUES (-1, NULL)")
        conn.commit()

    copies.take(f"sqlite+aiosqlite:///{source}", target, told)
    conn.close()
    assert len(heard) > 1
    assert heard[-1][0] == heard[-1][1]
    assert [done for done, _ in heard] == sorted({done for done, _ in heard}), "it began anew"
    with sqlite3.connect(target) as copy:
        assert copy.execute("SELECT count(*), min(n) FROM t").fetchone() == (3000, 0)


def test_a_copy_that_is_ended_leaves_no_half_of_a_database(tmp_path):
    source, target = tmp_path / "x.db", tmp_path / "y.db"
    with sqlite3.connect(source) as conn:
        conn.execute("CREATE TABLE t (filler BLOB)")
        conn.executemany("INSERT INTO t VALUES (zeroblob(4000))", [()] * 3000)

    def end(*_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copies.take(f"sqlite+aiosqlite:///{source}", target, end)
    assert not target.exists()


def test_an_archive_tells_of_its_bytes(tmp_path):
    source = tmp_path / "a"
    source.write_bytes(b"x" * 300_000)
    heard: list[tuple[int, int]] = []
    manifest = Manifest(format=FORMAT, headgate="1", taken_at=0, database="sqlite", revision=None, sha256={})
    path = Path(tmp_path / "b.tar")
    home_archive.pack(path, manifest, [home_archive.Member("home/a", source)], lambda *numbers: heard.append(numbers))
    assert heard[-1] == (300_000, 300_000)
    heard.clear()
    with home_archive.opened(path) as (tar, told_of):
        home_archive.unpack(tar, told_of, None, lambda *numbers: heard.append(numbers))
    assert heard[-1] == (300_000, 300_000)
