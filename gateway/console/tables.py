"""A table of a screen in three forms: HTML, CSV, Parquet. All three have the same rows and columns, as they are seen."""

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


def exported(table: Table, wanted: str) -> web.Response:
    """Returns the table as a file. Raises `ApiError` 400 for an unknown format, 501 where Parquet is not installed."""
    if wanted == "csv":
        return _file(table, "csv", "text/csv", to_csv(table).encode())
    if wanted == "parquet":
        return _file(table, "parquet", "application/vnd.apache.parquet", to_parquet(table))
    raise errors.invalid(f"'format' must be one of {', '.join(FORMATS)}.", "format")


def to_csv(table: Table) -> str:
    """Returns CSV with a head line. A text that a spreadsheet could take for a formula is made inert."""
    head = [column.name for column in table.columns]
    return csv_text.lines([head, *([_plain(row.get(name)) for name in head] for row in table.rows)])


def to_parquet(table: Table) -> bytes:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise errors.ApiError(
            501,
            "Parquet needs the package pyarrow: the operator installs it with headgate[export].",
            code="not_installed",
        ) from None
    columns = {column.name: [_of_kind(column, row) for row in table.rows] for column in table.columns}
    schema = pyarrow.schema([(column.name, _type_of(pyarrow, column.kind)) for column in table.columns])
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


def _plain(value: Any) -> Any:
    return str(value) if value is not None and not isinstance(value, int | float | str) else value


def _file(table: Table, ending: str, kind: str, data: bytes) -> web.Response:
    return web.Response(
        body=data,
        content_type=kind,
        headers={hdrs.CONTENT_DISPOSITION: f'attachment; filename="headgate-{table.name}.{ending}"'},
    )


def chosen(tables: Sequence[Table], name: str | None) -> Table:
    """Returns the table that a page with several exports: the named one, or the first."""
    return next((table for table in tables if table.name == name), tables[0])
