"""SQLite's cursor for SQLAlchemy, with one trip to the connection's thread for each statement.

A connection of aiosqlite has a thread of its own, and SQLAlchemy's cursor goes there four times: to make the driver's
cursor, to run the statement, to fetch its rows and to close the cursor. Each trip wakes that thread and then the loop,
and both wait for the interpreter's lock, which takes longer than most statements. Statements whose rows are streamed
have SQLAlchemy's own cursor.

A connection that only reads makes no trip to begin, since its transaction begins with its first statement, and does not
wait for the end.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from sqlalchemy.connectors.asyncio import AsyncAdapt_dbapi_connection, AsyncAdapt_dbapi_cursor
from sqlalchemy.dialects.sqlite.aiosqlite import AsyncAdapt_aiosqlite_connection, AsyncAdapt_aiosqlite_cursor
from sqlalchemy.util import EMPTY_DICT, await_only

T = TypeVar("T")


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
        adapted: Any = self._adapt_connection
        async with adapted._execute_mutex:
            self._cursor, rows = await adapted.trip(_to_its_end, statement)
        self._rows = deque(rows)

    async def _async_soft_close(self) -> None:
        """Does nothing: nothing is open."""

    def close(self) -> None:
        self._rows.clear()


class OneTripConnection(AsyncAdapt_aiosqlite_connection):
    __slots__ = ("only_reads",)

    _cursor_cls = OneTripCursor

    def __init__(self, dbapi: Any, connection: Any) -> None:
        super().__init__(dbapi, connection)
        self.only_reads = False
        """Transactions only read and are rolled back, and what runs in the thread begins them."""

    async def trip(self, work: Callable[..., T], *args: Any) -> T:
        """Runs `work` in the connection's thread, with the driver's connection and these arguments."""
        connection: Any = self._connection
        done: T = await connection._execute(_work, connection._conn, self.only_reads, work, args)
        return done

    def create_function(self, *args: Any, **options: Any) -> None:
        """Does not wait for the thread: SQLAlchemy defines two functions on each connection before anything runs there."""
        connection: Any = self._connection
        connection._tx.put_nowait((None, partial(connection._conn.create_function, *args, **options)))

    def cursor(self, server_side: bool = False) -> AsyncAdapt_dbapi_cursor:
        if server_side and self.only_reads:
            await_only(self.trip(_nothing))
        return super().cursor(server_side)

    def rollback(self) -> None:
        connection: Any = self._connection
        if self.only_reads and connection._connection:
            connection._tx.put_nowait((None, connection._conn.rollback))  # whatever follows comes after it
        else:
            super().rollback()


def _work(connection: sqlite3.Connection, begins: bool, work: Callable[..., T], args: tuple[Any, ...]) -> T:
    if begins and not connection.in_transaction:
        connection.execute("BEGIN")
    return work(connection, *args)


def _nothing(connection: sqlite3.Connection) -> None:
    """Leaves it to `_work` to begin the transaction."""


def _to_its_end(
    connection: sqlite3.Connection, statement: Callable[[sqlite3.Cursor], object]
) -> tuple[sqlite3.Cursor, list[Any]]:
    """Runs a statement and returns its cursor, closed, and its rows. Called in the connection's thread."""
    cursor = connection.cursor()
    try:
        statement(cursor)
        return cursor, cursor.fetchall() if cursor.description else []
    finally:
        cursor.close()
