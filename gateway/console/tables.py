"""A table of a screen in three forms: HTML, CSV, Parquet. A page shows one page of a long list; a file has all rows that
match, and the currencies of amounts as columns of their own.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from aiohttp import hdrs, web

from accounting.exports import csv_text
from gateway.base import errors

Kind = Literal["text", "code", "count", "money", "share", "ms", "moment", "state", "words"]
"""`money` is in micro-units, `share` is 0 to 1, `ms` is milliseconds, `moment` is Unix seconds, `state` a word or a
status that is coloured by what it means, `words` a sentence that is broken into lines."""
FORMATS = ("csv", "parquet")
MAX_EXPORTED_ROWS = 10_000
"""The rows of a list that one file has at most: they are held in memory."""
MAX_SHOWN_ROWS = 3_000
"""The rows of a table on a page: two for each minute of a day. A file has all."""
NUMBERS: frozenset[Kind] = frozenset(("count", "money", "share", "ms", "moment"))


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    """The column's name in exports."""
    label: str
    kind: Kind = "text"
    link: Callable[[Mapping[str, Any]], str | None] | None = None
    """The address that a cell leads to, from its row."""
    currency: str = ""
    """The key of the row that holds the currency of an amount."""
    names_tenant: bool = False
    """Whether it says whose the row is, which a viewer with one tenant knows."""


def money_column(name: str, label: str) -> Column:
    """Returns the column of an amount whose currency stands in its row."""
    return Column(name, label, "money", currency="currency")


@dataclass(frozen=True, slots=True)
class Table:
    name: str
    """The name of the exported file."""
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Any]]
    """Each row maps the columns' names to text, numbers or None. Further keys serve links."""
    empty: str
    """The sentence that stands where there are no rows; it says what to do next."""
    next_page: Mapping[str, str] = field(default_factory=dict)
    """The values of the query that lead to the next page; empty on the last one."""
    sums: Sequence[Mapping[str, Any]] = ()
    """The rows below, one for each currency. A file lacks them: who adds up its column would count twice."""

    @property
    def shown(self) -> Sequence[Mapping[str, Any]]:
        """The rows that a page shows."""
        return self.rows[:MAX_SHOWN_ROWS]


class File(web.Response):
    """The answer with a table as a file. The file itself is made after the screen has returned, off the loop.

    Raises `ApiError` 400 for an unknown format and for a page without a table.
    """

    def __init__(self, table: Table | None, wanted: str) -> None:
        check_format(wanted)
        if table is None:
            raise errors.invalid("This page has no table to export.", "format")
        kind = "text/csv" if wanted == "csv" else "application/vnd.apache.parquet"
        disposition = f'attachment; filename="headgate-{table.name}.{wanted}"'
        super().__init__(content_type=kind, headers={hdrs.CONTENT_DISPOSITION: disposition})
        self._table = table
        self._wanted = wanted

    @property
    def num_cells(self) -> int:
        return len(self._table.rows) * len(self._table.columns)

    def made(self) -> bytes:
        """Returns the file; for a thread. Raises `ApiError` 501 where Parquet is not installed."""
        return to_csv(self._table).encode() if self._wanted == "csv" else to_parquet(self._table)


def check_format(wanted: str) -> None:
    """Raises `ApiError` 400."""
    if wanted not in FORMATS:
        raise errors.invalid(f"'format' must be one of {', '.join(FORMATS)}.", "format")


def sums_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Sequence[Mapping[str, Any]]:
    """Returns the sums of these columns, a row for each currency: amounts of several currencies are never added."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        sums = found.setdefault(row["currency"], dict.fromkeys(names, 0))
        for name in names:
            sums[name] += row[name] or 0
    return [{**sums, "currency": currency} for currency, sums in found.items()]


def _columns_of(table: Table) -> Sequence[Column]:
    """Returns the columns of a file. An amount there is a number, so its currency has a column, too."""
    names = {column.name for column in table.columns}
    currencies = dict.fromkeys(column.currency for column in table.columns if column.currency not in {"", *names})
    return [*table.columns, *(Column(name, "Currency") for name in currencies)]


def to_csv(table: Table) -> str:
    """Returns CSV with a head line. A text that a spreadsheet could take for a formula is made inert."""
    head = [column.name for column in _columns_of(table)]
    return csv_text.lines([head, *([row.get(name) for name in head] for row in table.rows)])


def to_parquet(table: Table) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise errors.ApiError(
            501, "Parquet needs the package pyarrow: the operator installs it beside Headgate.", code="not_installed"
        ) from None
    columns = {column.name: [_of_kind(column, row) for row in table.rows] for column in _columns_of(table)}
    schema = pyarrow.schema([(column.name, _type_of(pyarrow, column.kind)) for column in _columns_of(table)])
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns, schema), sink)
    return sink.getvalue()


def _type_of(pyarrow: Any, kind: Kind) -> Any:
    if kind in {"share", "ms"}:
        return pyarrow.float64()
    return pyarrow.int64() if kind in NUMBERS else pyarrow.string()


def _of_kind(column: Column, row: Mapping[str, Any]) -> Any:
    """Returns a cell for a column of one type: a text that is a number in some rows is a text in all."""
    value = row.get(column.name)
    return value if value is None or column.kind in NUMBERS else str(value)


def chosen(tables: Sequence[Table] | Mapping[str, Table], name: str | None) -> Table | None:
    """Returns the table that a page with several exports: the named one, or the first. None where there are none. Raises
    `ApiError` 400 for a name that no table has.
    """
    by_name = tables if isinstance(tables, Mapping) else {table.name: table for table in tables}
    if name and name not in by_name:
        raise errors.invalid("This page has no such table.", "table")
    return by_name[name] if name else next(iter(by_name.values()), None)


def next_page(found: Mapping[str, Any], after_name: str = "after") -> Mapping[str, str]:
    """Returns the values of the query that lead to the page behind a list of the API; none behind the last one."""
    return {after_name: found["last_id"]} if found["has_more"] else {}
