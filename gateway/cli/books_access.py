"""Database access for commands that read the books from SQL themselves, so that they work when nothing else runs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from accounting.database import migrate
from accounting.database.db import Database
from accounting.values.errors import AccountingError
from gateway.base.home import Home, HomeError
from gateway.cli.common import fail
from gateway.cli.faults import database_fault

T = TypeVar("T")


def with_books(home: Path, work: Callable[[Database], Awaitable[T]]) -> T:
    """Runs `work` on the home's database, or on HEADGATE_DATABASE_URL. A failure is reported in one sentence."""
    try:
        return asyncio.run(_run(Home(home), work))
    except (AccountingError, SQLAlchemyError) as error:
        fail(database_fault(error) or f"The books cannot be read: {str(error).splitlines()[0]}")
    except HomeError as error:
        fail(str(error))


async def _run(home: Home, work: Callable[[Database], Awaitable[T]]) -> T:
    given = os.environ.get("HEADGATE_DATABASE_URL")
    if not given:
        home.refuse_absent()
    url = given or home.database_url
    await asyncio.to_thread(migrate.check, url)
    database = Database(url)
    try:
        return await work(database)
    finally:
        await database.close()
