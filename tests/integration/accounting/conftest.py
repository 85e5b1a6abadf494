"""`db`: a migrated, empty database of each dialect. Made once per run and dialect, then copied or emptied."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from migrated import template
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import migrate
from accounting.database.db import Database
from accounting.tables.models import Base

PEPPER = b"p" * 32


@pytest.fixture
def pepper() -> bytes:
    return PEPPER


@pytest.fixture(scope="session")
def sqlite_template() -> Path:
    return template()


@pytest.fixture(scope="session")
def postgresql_url() -> Iterator[str]:
    """One migrated database for the run: dropping one takes PostgreSQL seconds."""
    base = os.environ.get("HEADGATE_TEST_DATABASE_URL", "")
    if not base.startswith("postgresql"):
        with socket.socket() as sock:
            sock.settimeout(1)
            if sock.connect_ex(("127.0.0.1", 5432)) != 0:
                reason = "no PostgreSQL answers on 127.0.0.1:5432 and HEADGATE_TEST_DATABASE_URL is not set"
                pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
        user = os.environ.get("PGUSER", "postgres")
        base = f"postgresql+psycopg://{user}@127.0.0.1:5432/postgres"
    name = f"hg_accounting_{uuid.uuid4().hex[:12]}"
    server = create_engine(base, isolation_level="AUTOCOMMIT")
    with server.connect() as conn:
        conn.execute(text(f'CREATE DATABASE "{name}"'))
        conn.execute(text(f'ALTER DATABASE "{name}" SET synchronous_commit = off'))
    url = base.rsplit("/", 1)[0] + f"/{name}"
    try:
        migrate.upgrade(url)
        yield url
    finally:
        with server.connect() as conn:
            conn.execute(text(f'DROP DATABASE "{name}" WITH (FORCE)'))
        server.dispose()


class Emptied:
    """Takes a database back to what the migrations wrote. Triggers refuse DELETE, so they step aside for a moment: all
    together for a superuser, table by table for others."""

    def __init__(self, url: str) -> None:
        self._engine = create_engine(url)
        with self._engine.connect() as conn:
            self._is_superuser = conn.scalar(text("SELECT rolsuper FROM pg_roles WHERE rolname = current_user"))
        rows = {
            table.name: f'"{table.name}"' + (" WHERE id <> 'operator'" if table.name == "tenant" else "")
            for table in reversed(Base.metadata.sorted_tables)
            if table.name != "auth_epoch"
        }
        self._rows = rows
        self._written = text(
            " UNION ALL ".join(f"SELECT '{n}' WHERE EXISTS (SELECT 1 FROM {found})" for n, found in rows.items())
        )

    def empty(self) -> None:
        with self._engine.begin() as conn:
            written = set(conn.scalars(self._written))
            names = [name for name in self._rows if name in written]
            if not names:
                return
            if self._is_superuser:
                deletes = "; ".join(f"DELETE FROM {self._rows[name]}" for name in names)
                conn.exec_driver_sql(f"SET LOCAL session_replication_role = replica; {deletes}")
                return
            for name in names:
                conn.execute(text(f'ALTER TABLE "{name}" DISABLE TRIGGER USER'))
                conn.execute(text(f"DELETE FROM {self._rows[name]}"))
                conn.execute(text(f'ALTER TABLE "{name}" ENABLE TRIGGER USER'))

    def close(self) -> None:
        self._engine.dispose()


@pytest.fixture(scope="session")
def emptied(postgresql_url: str) -> Iterator[Emptied]:
    made = Emptied(postgresql_url)
    yield made
    made.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def migrated_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        path = tmp_path / "headgate.db"
        shutil.copy(request.getfixturevalue("sqlite_template"), path)
        return f"sqlite+aiosqlite:///{path}"
    url: str = request.getfixturevalue("postgresql_url")
    request.getfixturevalue("emptied").empty()
    return url


@pytest.fixture
async def db(migrated_url: str) -> AsyncIterator[Database]:
    database = Database(migrated_url)
    yield database
    await database.close()


@pytest.fixture
async def conn(db: Database) -> AsyncIterator[AsyncConnection]:
    """One transaction for the whole test, rolled back at its end."""
    async with db.write() as connection:
        yield connection
        await connection.rollback()
