from __future__ import annotations

import asyncio
import gc
import random
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from load import stretched
from sqlalchemy import Engine, event, func, insert, literal, make_url, select, text
from sqlalchemy.exc import IntegrityError

from accounting.database.db import Database, insert_new
from accounting.database.driver_selects import select_together
from accounting.ledger import ledger
from accounting.tables.models import JournalOffset, Tenant

ROW = {"slot": 1, "offset": 2, "posted_at_ms": 3}


async def offsets(db: Database) -> list[tuple[int, int]]:
    async with db.read() as conn:
        rows = await conn.execute(select(JournalOffset.slot, JournalOffset.offset).order_by("slot"))
        return [tuple(row) for row in rows]


async def test_a_write_block_commits_at_its_end_and_rolls_back_on_an_exception(db):
    async def write(slot: int, fails: bool) -> None:
        async with db.write() as conn:
            await conn.execute(insert(JournalOffset).values({**ROW, "slot": slot}))
            if fails:
                raise RuntimeError

    await write(1, fails=False)
    with pytest.raises(RuntimeError):
        await write(9, fails=True)
    assert await offsets(db) == [(1, 2)]


async def test_a_read_block_sees_one_snapshot(db):
    async with db.read() as conn:
        count = select(JournalOffset.slot)
        assert (await conn.execute(count)).all() == []
        async with db.write() as other:
            await other.execute(insert(JournalOffset).values(**ROW))
        assert (await conn.execute(count)).all() == []
    assert await offsets(db) == [(1, 2)]


async def test_the_version_of_the_data_changes_with_each_commit_of_anybody_and_with_nothing_else(db):
    other = Database(db.url)
    before = db.data_version()
    if db.dialect == "postgresql":
        assert before is None
        await other.close()
        return
    assert await offsets(db) == await offsets(other) == []
    assert db.data_version() == before
    for slot, database in enumerate((db, other)):
        async with database.write() as conn:
            await conn.execute(insert(JournalOffset).values({**ROW, "slot": slot}))
            assert db.data_version() == before, "it is not committed yet"
        assert db.data_version() != before
        before = db.data_version()
    await other.close()


async def test_insert_new_returns_the_new_rows_only(db):
    async with db.write() as conn:
        first = await insert_new(conn, JournalOffset.__table__, [ROW], (JournalOffset.slot,))
        rows = [ROW, {**ROW, "slot": 5}, {**ROW, "slot": 5}]
        second = await insert_new(conn, JournalOffset.__table__, rows, (JournalOffset.slot,))
        assert await insert_new(conn, JournalOffset.__table__, [], (JournalOffset.slot,)) == []
    assert [row.slot for row in first] == [1]
    assert [row.slot for row in second] == [5]


async def test_writers_that_read_first_do_not_fail_each_other(db):
    async def count_up() -> None:
        async with db.write() as conn:
            present = await conn.scalar(select(JournalOffset.offset).with_for_update())
            await asyncio.sleep(0.001)
            await conn.execute(text('UPDATE journal_offset SET "offset" = :n'), {"n": present + 1})

    async with db.write() as conn:
        await conn.execute(insert(JournalOffset).values({**ROW, "offset": 0}))
    await asyncio.gather(*(count_up() for _ in range(12)))
    assert await offsets(db) == [(1, 12)]


@pytest.mark.parametrize("migrated_url", ["postgresql"], indirect=True)
async def test_a_server_gives_up_a_client_that_is_gone_and_one_that_stands_still_in_its_turn(db):
    """It kept the dead client's transaction for two hours, and with it the turn for which all other posters waited."""
    names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
    idle = text("SELECT current_setting('idle_in_transaction_session_timeout')")
    async with db.write() as conn:
        found = [await conn.scalar(text(f"SELECT setting FROM pg_settings WHERE name = '{name}'")) for name in names]
        before = await conn.scalar(idle)
        await ledger.take_turn(conn)
        assert await conn.scalar(idle) == "30s"
    assert found == ["10", "5", "2", "10000"]
    async with db.read() as conn:
        assert await conn.scalar(idle) == before


async def test_references_are_enforced(db):
    stray = text("INSERT INTO model_limit (tenant_id, model) VALUES ('nobody', 'm')")
    async with db.write() as conn:
        with pytest.raises(IntegrityError):
            await conn.execute(stray)
        await conn.rollback()


async def test_an_error_says_no_value_of_its_statement(db):
    stray = text("INSERT INTO model_limit (tenant_id, model) VALUES ('nobody', :model)")
    with pytest.raises(IntegrityError) as caught:
        async with db.write() as conn:
            await conn.execute(stray, {"model": "words of a tenant"})
    assert "words of a tenant" not in str(caught.value)


async def test_sqlite_is_durable_and_writes_ahead(tmp_path):
    database = Database(f"sqlite+aiosqlite:///{tmp_path}/x.db")
    async with database.read() as conn:
        pragmas = {
            name: await conn.scalar(text(f"PRAGMA {name}"))
            for name in ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
        }
    await database.close()
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "busy_timeout": 5000, "foreign_keys": 1}


@contextmanager
def noted(name: str) -> Iterator[list[object]]:
    """The arguments of every event of that name, of all engines."""
    found: list[object] = []

    def note(*arguments: object) -> None:
        found.append(arguments)

    event.listen(Engine, name, note)
    try:
        yield found
    finally:
        event.remove(Engine, name, note)


async def test_p3_inserts_of_every_length_are_few_statements(tmp_path, sqlite_template):
    """P3: the driver keeps each statement prepared, and one of hundreds of rows takes half a megabyte."""
    path = tmp_path / "x.db"
    path.write_bytes(sqlite_template.read_bytes())
    database = Database(f"sqlite+aiosqlite:///{path}")
    with noted("before_cursor_execute") as executed:
        for count in range(1, 80):
            rows = [{**ROW, "slot": 100 * count + number} for number in range(count)]
            async with database.write() as conn:
                new = await insert_new(conn, JournalOffset.__table__, rows, (JournalOffset.slot,))
            assert {row.slot for row in new} == {row["slot"] for row in rows}
    await database.close()
    inserts = {call[2] for call in executed if call[2].startswith("INSERT")}
    assert len(inserts) <= 16
    assert max(statement.count("?") for statement in inserts) <= 16 * len(ROW)


async def test_p3_a_crowd_of_readers_and_writers_opens_no_connection_twice(tmp_path, sqlite_template):
    """P3: each is a thread with caches of its own, and was opened and closed again for every crowd."""
    path = tmp_path / "x.db"
    path.write_bytes(sqlite_template.read_bytes())
    database = Database(f"sqlite+aiosqlite:///{path}", pool_size=2)

    async def read() -> None:
        async with database.read() as conn:
            await conn.scalar(select(Tenant.name))

    async def write(slot: int) -> None:
        async with database.write() as conn:
            await conn.execute(insert(JournalOffset).values({**ROW, "slot": slot}))

    opened: list[object] = []
    for engine in {database._readers.sync_engine.pool, database._writers.sync_engine.pool}:
        event.listen(engine, "connect", lambda *_: opened.append(1))
    for turn in range(8):
        await asyncio.gather(*(read() for _ in range(20)), *(write(20 * turn + n) for n in range(5)))
    await database.close()
    assert len(opened) <= 4 + 1


async def test_a_cancelled_write_leaves_no_lock_behind(tmp_path, sqlite_template, monkeypatch):
    """Whatever statement the cancellation hits, and although nothing is collected meanwhile. A statement whose rows are
    streamed, such as those of a month that is closed, is held half-read by the cancelled task."""
    monkeypatch.setattr("accounting.database.db.BUSY_TIMEOUT_MS", 500)
    path = tmp_path / "headgate.db"
    path.write_bytes(sqlite_template.read_bytes())
    db, moments = Database(f"sqlite+aiosqlite:///{path}"), random.Random(1)
    first = select(literal(1).label("i")).cte("n", recursive=True)
    further = first.union_all(select(first.c.i + 1).where(first.c.i < 300))
    numbers = select(further.c.i).execution_options(yield_per=10)

    async def write_for_ever(slot: int) -> None:
        while True:
            async with db.write() as conn:
                row = ROW | {"slot": slot}
                await insert_new(conn, JournalOffset.__table__, [row], (JournalOffset.slot,))
                async with conn.stream(numbers) as rows:
                    assert [number async for (number,) in rows] == list(range(1, 301))
                await conn.execute(text("DELETE FROM journal_offset"))

    gc.disable()
    try:
        for _ in range(300):
            writers = [asyncio.create_task(write_for_ever(slot)) for slot in range(2)]
            await asyncio.sleep(moments.random() * 0.004)
            for writer in writers:
                writer.cancel()
            await asyncio.wait(writers)
            async with db.write() as conn:
                await conn.execute(insert(JournalOffset).values(ROW | {"slot": 9}))
                await conn.execute(text("DELETE FROM journal_offset"))
    finally:
        gc.enable()
        await db.close()


async def test_two_processes_on_one_sqlite_file_wait_for_each_other(tmp_path, sqlite_template):
    path = tmp_path / "x.db"
    path.write_bytes(sqlite_template.read_bytes())
    database = Database(f"sqlite+aiosqlite:///{path}")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    other.execute("UPDATE tenant SET name = 'first' WHERE id = 'operator'")

    async def second() -> str | None:
        async with database.write() as conn:
            return await conn.scalar(select(Tenant.name))

    waiting = asyncio.create_task(second())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    other.execute("COMMIT")
    other.close()
    assert await waiting == "first"
    await database.close()


def test_a_foreign_url_is_refused_by_name():
    with pytest.raises(ValueError, match="not mysql://"):
        Database("mysql://localhost/x")


@pytest.mark.parametrize("is_together", [False, True])
async def test_a_cancelled_statement_ends_at_once(db, is_together):
    """A gateway that stopped in a check of ten million rows waited for its end, since a connection in use cannot be
    closed."""
    first = select(literal(1).label("i")).cte("n", recursive=True)
    numbers = first.union_all(select(first.c.i + 1))
    forever = {"sqlite": select(func.count()).select_from(numbers), "postgresql": select(func.pg_sleep(600))}

    async def look() -> None:
        async with db.read() as conn:
            if is_together:
                await select_together(conn, {}, forever[db.dialect])
            await conn.execute(forever[db.dialect])

    task = asyncio.create_task(look())
    await asyncio.sleep(0.3)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=stretched(5))
    assert done
    assert task.cancelled()
    async with db.read() as conn:
        assert await conn.scalar(text("SELECT 1")) == 1


async def test_a_writer_sees_what_came_before_its_turn_whatever_the_servers_default_is(db: Database) -> None:
    if db.dialect != "postgresql":
        pytest.skip("SQLite has no isolation levels: its one writer sees everything")
    name = make_url(db.url).database
    change = f'ALTER DATABASE "{name}"'
    async with db.write() as conn:
        await conn.execute(text(f"{change} SET default_transaction_isolation = 'repeatable read'"))
    other = Database(db.url)
    async with other.write() as conn:
        assert (await conn.execute(text("SHOW transaction_isolation"))).scalar() == "read committed"
        await conn.execute(text(f"{change} RESET default_transaction_isolation"))
    async with other.read() as conn:
        assert (await conn.execute(text("SHOW transaction_isolation"))).scalar() == "repeatable read"
    await other.close()
