"""Statements on SQLite take one trip to the thread of their connection, and answer as SQLAlchemy's own cursor does."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiosqlite
import pytest
from sqlalchemy import text
from sqlalchemy.exc import IntegrityError, OperationalError

from accounting.database.db import Database


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    made = Database(f"sqlite+aiosqlite:///{tmp_path / 'x.db'}")
    async with made.write() as conn:
        await conn.execute(text("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT UNIQUE)"))
    yield made
    await made.close()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The trips to threads of connections that somebody waits for, from now on."""
    trips: list[Any] = []
    execute = aiosqlite.Connection._execute

    async def count(connection: aiosqlite.Connection, function: Any, *args: Any) -> Any:
        trips.append(function)
        return await execute(connection, function, *args)

    monkeypatch.setattr(aiosqlite.Connection, "_execute", count)
    return trips


async def test_a_statement_takes_one_trip(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    trips = counted(monkeypatch)
    async with database.write() as conn:
        trips.clear()
        await conn.execute(text("INSERT INTO t (b) VALUES (:b)"), [{"b": "x"}, {"b": "y"}])
        assert len(trips) == 1
        assert (await conn.execute(text("SELECT b FROM t ORDER BY a"))).all() == [("x",), ("y",)]
        assert len(trips) == 2


async def test_a_read_is_one_trip_and_waits_for_no_other(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    async with database.write() as conn:
        await conn.execute(text("INSERT INTO t (b) VALUES ('x')"))
    async with database.read() as conn:
        assert await conn.scalar(text("SELECT count(*) FROM t")) == 1
    trips = counted(monkeypatch)
    for _ in range(2):
        async with database.read() as conn:
            assert (await conn.execute(text("SELECT b FROM t"))).all() == [("x",)]
    assert len(trips) == 2


async def test_rows_and_counts_are_those_of_the_driver(database: Database) -> None:
    async with database.write() as conn:
        made = await conn.execute(text("INSERT INTO t (b) VALUES ('x'), ('y') RETURNING a, b"))
        assert list(made.keys()) == ["a", "b"]
        assert made.all() == [(1, "x"), (2, "y")]
        many = await conn.execute(text("INSERT INTO t (b) VALUES (:b)"), [{"b": "v"}, {"b": "w"}])
        assert many.rowcount == 2
        assert (await conn.execute(text("UPDATE t SET b = b || '!' WHERE a > 1"))).rowcount == 3
        assert (await conn.execute(text("DELETE FROM t WHERE a > 9"))).rowcount == 0
        assert (await conn.execute(text("SELECT a FROM t WHERE a > 9"))).all() == []


async def test_an_error_is_the_drivers_and_the_transaction_goes_on(database: Database) -> None:
    async with database.write() as conn:
        await conn.execute(text("INSERT INTO t (b) VALUES ('x')"))
        with pytest.raises(IntegrityError) as refused:
            await conn.execute(text("INSERT INTO t (b) VALUES ('x')"))
        assert isinstance(refused.value.orig, sqlite3.IntegrityError)
        await conn.execute(text("INSERT INTO t (b) VALUES ('y')"))
    async with database.read() as conn:
        assert await conn.scalar(text("SELECT count(*) FROM t")) == 2


async def test_rows_can_be_streamed(database: Database) -> None:
    async with database.write() as conn:
        await conn.execute(text("INSERT INTO t (b) VALUES (:b)"), [{"b": str(number)} for number in range(7)])
    async with database.read() as conn, conn.stream(text("SELECT a FROM t").execution_options(yield_per=2)) as rows:
        assert [row.a async for row in rows] == [1, 2, 3, 4, 5, 6, 7]


async def test_a_streamed_read_sees_one_snapshot_with_what_follows(database: Database) -> None:
    async with database.read() as conn:
        async with conn.stream(text("SELECT a FROM t").execution_options(yield_per=2)) as rows:
            assert [row.a async for row in rows] == []
        async with database.write() as other:
            await other.execute(text("INSERT INTO t (b) VALUES ('x')"))
        assert await conn.scalar(text("SELECT count(*) FROM t")) == 0
    async with database.read() as conn:
        assert await conn.scalar(text("SELECT count(*) FROM t")) == 1


async def test_a_read_that_failed_leaves_its_connection_as_it_was(database: Database) -> None:
    async def fail() -> None:
        async with database.read() as conn:
            await conn.execute(text("SELECT b FROM t"))
            await conn.execute(text("SELECT b FROM nowhere"))

    for _ in range(2):
        with pytest.raises(OperationalError):
            await fail()
    async with database.write() as conn:
        await conn.execute(text("INSERT INTO t (b) VALUES ('x')"))
    async with database.read() as conn:
        assert await conn.scalar(text("SELECT b FROM t")) == "x"
