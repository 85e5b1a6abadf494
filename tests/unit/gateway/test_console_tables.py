"""Tables of the console as files."""

from __future__ import annotations

import io

import pytest

from gateway.console.tables import Column, Table, money_column, sums_of, to_csv, to_parquet


def test_a_column_of_texts_that_holds_numbers_is_exported_as_texts() -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = [Column("name", "Name"), Column("weight", "Weight"), Column("count", "Count", "count")]
    rows = [{"name": "a", "weight": 1.5, "count": 2}, {"name": 7, "weight": "heavy", "count": None}]
    table = parquet.read_table(io.BytesIO(to_parquet(Table("t", columns, rows, "empty"))))
    assert table.to_pydict() == {"name": ["a", "7"], "weight": ["1.5", "heavy"], "count": [2, None]}


def test_a_file_has_the_currency_of_each_amount_and_no_row_of_sums() -> None:
    columns = [money_column("before", "Before"), Column("name", "Name"), money_column("after", "After")]
    rows = [
        {"name": "a", "before": 1, "after": 2, "currency": "EUR"},
        {"name": "b", "before": 3, "after": 4, "currency": "JPY"},
    ]
    table = Table("t", columns, rows, "", sums=sums_of(rows, ["before"]))
    assert to_csv(table).splitlines()[1:] == ['1,"a",2,"EUR"', '3,"b",4,"JPY"']
    named = Table("t", [*columns, Column("currency", "Currency")], rows, "")
    assert to_csv(named) == to_csv(table)


def test_amounts_of_several_currencies_are_never_added() -> None:
    rows = [{"cost": 1, "currency": "EUR"}, {"cost": 5, "currency": "USD"}, {"cost": None, "currency": "EUR"}]
    assert sums_of([*rows, rows[0]], ["cost"]) == [{"cost": 2, "currency": "EUR"}, {"cost": 5, "currency": "USD"}]
