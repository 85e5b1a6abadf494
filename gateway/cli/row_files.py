"""Writers of rows into a file, page by page: CSV, JSON lines, Parquet."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import IO, Any, Literal, Protocol

import click
import msgspec

from accounting.exports import csv_text
from accounting.exports.exports import SCHEMA_VERSION

Format = Literal["csv", "jsonl", "parquet"]
_JSON = msgspec.json.Encoder(decimal_format="number")


class Columns(msgspec.Struct, frozen=True):
    """The column names in their order. A column that is neither an integer nor a decimal is text."""

    names: Sequence[str]
    integers: Collection[str] = ()
    decimals: Mapping[str, int] = {}
    """The most places of each decimal."""


class RowFile(Protocol):
    def write(self, page: Sequence[Sequence[Any]]) -> None: ...
    def close(self) -> None: ...


class CsvFile:
    def __init__(self, file: IO[bytes], columns: Columns) -> None:
        self._file = file
        file.write(csv_text.line(columns.names).encode())

    def write(self, page: Sequence[Sequence[Any]]) -> None:
        self._file.write(csv_text.lines(page).encode())

    def close(self) -> None:
        pass


class JsonLinesFile:
    def __init__(self, file: IO[bytes], columns: Columns) -> None:
        self._file = file
        self._names = columns.names

    def write(self, page: Sequence[Sequence[Any]]) -> None:
        self._file.write(_JSON.encode_lines([dict(zip(self._names, row, strict=True)) for row in page]))

    def close(self) -> None:
        pass


class ParquetFile:
    def __init__(self, file: IO[bytes], columns: Columns) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise click.ClickException(
                "Parquet needs pyarrow: `pip install pyarrow`, or take --format csv or jsonl."
            ) from None
        self._arrow = pyarrow
        fields = [(name, self._type(name, columns)) for name in columns.names]
        metadata = {"headgate.schema_version": SCHEMA_VERSION}
        self._schema = pyarrow.schema(fields, metadata=metadata)
        self._writer = pyarrow.parquet.ParquetWriter(file, self._schema, compression="zstd")

    def write(self, page: Sequence[Sequence[Any]]) -> None:
        columns = [
            self._arrow.array(list(values), field.type)
            for values, field in zip(zip(*page, strict=True), self._schema, strict=True)
        ]
        if columns:
            self._writer.write_batch(self._arrow.record_batch(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()

    def _type(self, name: str, columns: Columns) -> Any:
        if name in columns.integers:
            return self._arrow.int64()
        places = columns.decimals.get(name)
        return self._arrow.string() if places is None else self._arrow.decimal128(38, places)


FORMATS: dict[Format, Callable[[IO[bytes], Columns], RowFile]] = {
    "csv": CsvFile,
    "jsonl": JsonLinesFile,
    "parquet": ParquetFile,
}
