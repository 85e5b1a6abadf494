"""SQLite's cursor for SQLAlchemy, with one trip to the connection's thread for each statement.

A connection of aiosqlite has a thread of its own, and SQLAlchemy's cursor goes there four times: to make the driver's
cursor, to run the statement, to fetch its rows and to close the cursor. Each trip wakes that thread and then the loop,
and both wait for the interpreter's lock, which takes longer than most statements. Statements whose rows are streamed
have SQLAlchemy's own cursor.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable
from typing import Any

from aiosqlite import Connection
from sqlalchemy.connectors.asyncio import AsyncAdapt_dbapi_connection
from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_connection, AsyncAdapt_aiosqlite_cursor
from sqlalchemy.util import EMPTY_DICT


class OneTripCursor(AsyncAdapt_aiosqlite_cursor):
    """A cursor that holds what a statement has left: its rows, and the driver's cursor, which is closed."""

    __slots__ = ()

    _cursor: Any

    def __init__(self, adapt_connection: AsyncAdapt_dbapi_connection) -> None:
        self._adapt_connection = adapt_connection
        self._connection = adapt_connection._connection
        self._cursor = None
        self._rows = deque()
        self._soft_closed_memoized = EMPTY_DICT

    async def _execute_async(self, operation: Any, parameters: Any) -> None:
        await self._run(lambda cursor: cursor.execute(operation, parameters or ()))

    async def _executemany_async(self, operation: Any, seq_of_parameters: Any) -> None:
        await self._run(lambda cursor: cursor.executemany(operation, seq_of_parameters))

    async def _run(self, statement: Callable[[sqlite3.Cursor], object]) -> None:
        connection: Any = self._connection
        async with self._adapt_connection._execute_mutex:
            self._cursor, rows = await connection._execute(_to_its_end, connection, statement)
        self._rows = deque(rows)

    async def _async_soft_close(self) -> None:
        """Does nothing: nothing is open."""

    def close(self) -> None:
        self._rows.clear()


class OneTripConnection(AsyncAdapt_aiosqlite_connection):
    __slots__ = ()

    _cursor_cls = OneTripCursor


def _to_its_end(
    connection: Connection, statement: Callable[[sqlite3.Cursor], object]
) -> tuple[sqlite3.Cursor, list[Any]]:
    """Runs a statement and returns its cursor, closed, and its rows. Called in the connection's thread."""
    cursor = connection._conn.cursor()
    try:
        statement(cursor)
        return cursor, cursor.fetchall() if cursor.description else []
    finally:
        cursor.close()
