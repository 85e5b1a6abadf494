"""An INSERT as SQLite's driver takes it: its text, and the values of rows in the order of its places.

SQLAlchemy makes each value a parameter of its own first, which takes four times as long for a wide row. The module
knows no connection and no table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import itemgetter
from typing import Any

from sqlalchemy.dialects import sqlite

Row = Mapping[str, Any]


class DriverInsert:
    """One INSERT, compiled for rows with the same names."""

    def __init__(self, statement: sqlite.Insert, names: tuple[str, ...]) -> None:
        dialect = sqlite.dialect(paramstyle="qmark")
        compiled = statement.compile(dialect=dialect, column_keys=names)
        ordered, table = compiled.positiontup or [], statement.table
        binds = [table.c[name].type.dialect_impl(dialect).bind_processor(dialect) for name in ordered]
        self.text = str(compiled)
        """The statement of one row."""
        self._places = f"({', '.join('?' * len(ordered))})"
        assert self.text.count(self._places) == 1
        self._in_order: Callable[[Row], tuple[Any, ...]] = (
            itemgetter(*ordered) if len(ordered) > 1 else lambda row: (row[ordered[0]],)
        )
        self._binds = [(place, bind) for place, bind in enumerate(binds) if bind is not None]

    def of_rows(self, count: int) -> str:
        """Returns the statement that takes so many rows at once."""
        return self.text.replace(self._places, ", ".join([self._places] * count))

    def values(self, rows: Sequence[Row]) -> tuple[Any, ...]:
        """Returns the values of all rows, one row after the other."""
        found = map(self._in_order, rows)
        return tuple(chain.from_iterable(map(self._bound, found) if self._binds else found))

    def _bound(self, row: tuple[Any, ...]) -> list[Any]:
        """Returns the row with those values that the driver does not know in its own form, such as JSON."""
        values = list(row)
        for place, bind in self._binds:
            values[place] = bind(values[place])
        return values


@cache
def driver_insert(statement: sqlite.Insert, names: tuple[str, ...]) -> DriverInsert:
    """Returns the compiled form of a statement, which its caller keeps. Rows that it returns come as the driver has them:
    numbers and text.
    """
    return DriverInsert(statement, names)
