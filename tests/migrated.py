"""Migrated databases. All migrations of SQLite take a quarter of a second of processor time, so its file is a copy of one
that was migrated once in a test process."""

from __future__ import annotations

import asyncio
import atexit
import functools
import shutil
import sqlite3
import tempfile
from pathlib import Path

from accounting.database import migrate


def migrated(url: str) -> None:
    """Migrates the database. What stands there already is migrated in place."""
    path = Path(url.removeprefix("sqlite+aiosqlite:///"))
    if url.startswith("sqlite") and not path.exists():
        shutil.copy(template(), path)
    else:
        migrate.upgrade(url)


async def migrated_database(url: str) -> None:
    """`migrated`, in a thread."""
    await asyncio.to_thread(migrated, url)


@functools.cache
def template() -> Path:
    """The file that is copied."""
    directory = Path(tempfile.mkdtemp(prefix="headgate-migrated-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    path = directory / "headgate.db"
    migrate.upgrade(f"sqlite+aiosqlite:///{path}")
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    return path
