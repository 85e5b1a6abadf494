"""CSV that a spreadsheet shows and never runs (RFC 4180): text that a formula could begin with gets a leading quote.

Texts are always quoted and numbers never, so that a negative number stays one.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

# At the beginning, and wherever a program that separates by something else would see one.
_BEGINS_A_FORMULA = re.compile(r"(^|[\";,\n])(?=\s*[=+\-@\t\r\x00])")


def line(cells: Sequence[Any]) -> str:
    """One record, its end included. Cells: text, integers, decimals, None."""
    return lines([cells])


def lines(records: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_NONNUMERIC).writerows([_cell(cell) for cell in record] for record in records)
    return text.getvalue()


def _cell(cell: Any) -> Any:
    if isinstance(cell, bool) or not isinstance(cell, int | Decimal | str):
        cell = "" if cell is None else str(cell)
    # A NUL ends a text for some readers and is refused by others.
    return _BEGINS_A_FORMULA.sub(r"\1'", cell).replace("\0", "") if isinstance(cell, str) else cell
