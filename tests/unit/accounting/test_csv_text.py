"""Texts in CSV are never formulas; numbers stay numbers."""

from __future__ import annotations

import csv
import io
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.exports import csv_text


@pytest.mark.parametrize("first", ["=", "+", "-", "@", "\t", "\r", "\0="])
@pytest.mark.parametrize("before", ["", 'a"', "a;", "a,", "a\n"])
def test_what_a_formula_begins_with_gets_a_quote(first, before):
    (record,) = csv.reader(io.StringIO(csv_text.line([before + first + "1"]), newline=""))
    assert "'" in record[0]
    assert record[0].replace("'", "", 1) == (before + first + "1").replace("\0", "")


@pytest.mark.parametrize("number", [-5, 0, 2**53, Decimal("-1.5"), Decimal(-1).scaleb(-6), -0.25, 0.4])
def test_numbers_are_untouched_and_unquoted(number):
    assert csv_text.line([number]) == f"{number}\r\n"


def test_other_texts_stay_and_are_quoted():
    assert csv_text.line(["a=b", "x-y", "", None, True]) == '"a=b","x-y","","","True"\r\n'


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_no_cell_begins_like_a_formula_however_it_is_split(cells):
    for separator in ('"', ";", ",", "\n"):
        for cell in next(csv.reader(io.StringIO(csv_text.line(cells), newline="")), []):
            for part in cell.split(separator):
                assert not part.lstrip().startswith(("=", "+", "-", "@"))
