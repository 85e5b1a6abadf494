"""A database that commits and loses its answer, as at a failover."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError

from accounting.database.db import Database
from accounting.tables.batch_models import File


def lose_the_reply_to_a_files_commit(
    monkeypatch: pytest.MonkeyPatch, database: Database, *, is_gone: bool = False
) -> None:
    """The next transaction that registers a file is committed and raises. With `is_gone` so does each later one."""
    write, is_lost = database.write, False

    @asynccontextmanager
    async def losing() -> AsyncIterator[Any]:
        nonlocal is_lost
        if is_lost and is_gone:
            raise lost()
        async with write() as conn:
            before = await conn.scalar(select(func.count()).select_from(File))
            yield conn
            after = await conn.scalar(select(func.count()).select_from(File))
        if after != before and not is_lost:
            is_lost = True
            raise lost()

    monkeypatch.setattr(database, "write", losing)


def lost() -> OperationalError:
    return OperationalError("COMMIT", {}, OSError("the connection was reset"))
