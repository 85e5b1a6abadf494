"""SELECTs that are read together: SQLite's driver runs all of them in one trip to the connection's thread.

SQLAlchemy takes several times as long for a statement as SQLite does for one of few rows. These statements are compiled
once, and their rows are named tuples. PostgreSQL runs one after the other, with SQLAlchemy's own rows. The module knows
no table.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Select
from sqlalchemy.dialects import sqlite
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection

Processor = Callable[[Any], Any] | None


class DriverSelect:
    """One SELECT, compiled. Each of its parameters is one value."""

    def __init__(self, statement: Select[*tuple[Any, ...]]) -> None:
        dialect = sqlite.dialect(paramstyle="qmark")
        compiled = statement.compile(dialect=dialect)
        columns = statement.selected_columns
        self.text = str(compiled)
        assert not compiled.post_compile_params, "a list of values is another statement for each of its lengths"
        self._names: Sequence[str] = compiled.positiontup or ()
        self._own = {name: bind.value for name in self._names if not (bind := compiled.binds[name]).required}
        """The parameters that the statement itself has values for."""
        kind_of: Callable[..., Any] = namedtuple  # the names are known when it runs
        self._of_row: Callable[[Any], Any] = kind_of("Row", columns.keys(), rename=True)._make
        found: list[Processor] = [
            column.type.dialect_impl(dialect).result_processor(dialect, None) for column in columns
        ]
        self._processors = [(place, processor) for place, processor in enumerate(found) if processor is not None]

    def values(self, named: Mapping[str, Any]) -> tuple[Any, ...]:
        known = {**self._own, **named}
        return tuple([known[name] for name in self._names])

    def shaped(self, rows: list[Any]) -> list[Any]:
        """Returns the driver's rows as named tuples, with values such as JSON in our form."""
        return list(map(self._of_row, map(self._processed, rows) if self._processors else rows))

    def _processed(self, row: Sequence[Any]) -> list[Any]:
        values = list(row)
        for place, processor in self._processors:
            values[place] = processor(values[place])
        return values


_driver_select = cache(DriverSelect)


async def select_together(
    conn: AsyncConnection, named: Mapping[str, Any], *statements: Select[*tuple[Any, ...]]
) -> list[list[Any]]:
    """Returns the rows of each statement. `named` holds the parameters of all of them. The caller keeps the statements:
    each one is compiled once. Raises what SQLAlchemy raises."""
    if conn.dialect.name != "sqlite":
        return [list((await conn.execute(statement, named)).all()) for statement in statements]
    selects = [_driver_select(statement) for statement in statements]
    asked = [(one.text, one.values(named)) for one in selects]
    connected: Any = conn.sync_connection
    for text, values in asked:  # whoever listens for statements hears of these, too
        connected.dispatch.before_cursor_execute(connected, None, text, values, None, False)
    connection: Any = connected.connection.dbapi_connection
    try:
        found = await connection.trip(_run, asked)
    except asyncio.CancelledError:
        await conn.invalidate()  # a connection is given back once its statement has ended: this one is stopped
        raise
    except sqlite3.Error as error:
        raise DBAPIError.instance(None, None, error, sqlite3.Error, dialect=conn.dialect) from error
    return [one.shaped(rows) for one, rows in zip(selects, found, strict=True)]


def _run(connection: sqlite3.Connection, asked: Sequence[tuple[str, Sequence[Any]]]) -> list[list[Any]]:
    cursor = connection.cursor()
    try:
        return [cursor.execute(text, values).fetchall() for text, values in asked]
    finally:
        cursor.close()
