"""CSV that a spreadsheet shows and never runs (RFC 4180): a text that could begin a formula gets a leading quote.

Texts are always quoted and numbers never, so that a negative number stays a number.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from decimal import Decimal
from typing import Any

# A formula could begin at the start of a text, and after any character that another program takes as a separator.
_BEGINS_A_FORMULA = re.compile(r"(^|[\";,\n])(?=\s*[=+\-@\t\r\x00])")


def line(cells: Sequence[Any]) -> str:
    """Returns one record with its line end. Cells are text, numbers or None."""
    return lines([cells])


def lines(records: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_NONNUMERIC).writerows([_cell(cell) for cell in record] for record in records)
    return text.getvalue()


def _cell(cell: Any) -> Any:
    if isinstance(cell, bool) or not isinstance(cell, int | float | Decimal | str):
        cell = "" if cell is None else str(cell)
    # A NUL ends a text for some readers; others refuse it.
    return _BEGINS_A_FORMULA.sub(r"\1'", cell).replace("\0", "") if isinstance(cell, str) else cell
