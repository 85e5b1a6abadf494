"""Tables of the console as files."""

from __future__ import annotations

import io

import pytest

from gateway.console.tables import Column, Table, to_parquet


def test_a_column_of_texts_that_holds_numbers_is_exported_as_texts() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = [Column("name", "Name"), Column("weight", "Weight"), Column("count", "Count", "count")]
    rows = [{"name": "a", "weight": 1.5, "count": 2}, {"name": 7, "weight": "heavy", "count": None}]
    table = parquet.read_table(io.BytesIO(to_parquet(Table("t", columns, rows, "empty"))))
    assert table.to_pydict() == {"name": ["a", "7"], "weight": ["1.5", "heavy"], "count": [2, None]}
