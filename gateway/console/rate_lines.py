"""Rates as lines of text that a person edits: `model, tier, cached, written, uncached, output`, in decimal amounts.

The functions are pure. A line per model and tier keeps a sheet of a thousand models in one field of a form.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.schema.money import decimal, micro_units

CLASSES = ("cache_read", "cache_write", "uncached", "output")
KEPT = ("cache", "pinned")
MAX_LINES = 2_000


def rates_text(rates: Iterable[Mapping[str, Any]]) -> str:
    return _text([one["model"], one["tier"], *(decimal(one[name], 2) for name in CLASSES)] for one in rates)


def residency_text(rates: Iterable[Mapping[str, Any]]) -> str:
    return _text([one["model"], *(decimal(one[name], 2) for name in KEPT)] for one in rates)


def read_rates(text: str) -> list[dict[str, Any]]:
    """Raises ValueError with the number of the line and what is wrong with it."""
    return [
        {"model": model, "tier": tier} | dict(zip(CLASSES, amounts, strict=True))
        for (model, tier), amounts in _records(text, "model, tier, cached, written, uncached, output", 2)
    ]


def read_residency(text: str) -> list[dict[str, Any]]:
    return [
        {"model": model} | dict(zip(KEPT, amounts, strict=True))
        for (model,), amounts in _records(text, "model, cached, pinned", 1)
    ]


def _records(text: str, form: str, num_names: int) -> list[tuple[list[str], list[int]]]:
    num_cells = form.count(",") + 1
    found = []
    lines = text.splitlines()
    if len(lines) > MAX_LINES:
        raise ValueError(f"A version has at most {MAX_LINES} lines.")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            [cells] = csv.reader([line], skipinitialspace=True, strict=True)
        except (csv.Error, ValueError):
            raise ValueError(f"Line {number} cannot be read: it is written {form}.") from None
        if len(cells) != num_cells:
            raise ValueError(f"Line {number} has {len(cells)} values: it is written {form}.")
        try:
            found.append(([cell.strip() for cell in cells[:num_names]], [_rate(cell) for cell in cells[num_names:]]))
        except ValueError as error:
            raise ValueError(f"Line {number}: {error}") from None
    return found


def _rate(cell: str) -> int:
    rate = micro_units(cell.strip())
    if rate < 0:
        raise ValueError("a rate must not be below 0.")
    return rate


def _text(rows: Iterable[Sequence[str]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def changes(
    before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]], names: Sequence[str] = CLASSES
) -> list[dict[str, Any]]:
    """Returns the rates that differ between two versions. A rate that is missing in one of them is None there. With the
    names `KEPT` they are the rates of kept KV.
    """
    old, new = (_by_key(rates, names) for rates in (before, after))
    found = []
    for key in sorted({**old, **new}):
        was, is_ = old.get(key), new.get(key)
        if was != is_:
            model, tier, name = key
            share = None if was is None or is_ is None or was == 0 else (is_ - was) / was
            found.append(
                {"model": model, "tier": tier, "token_class": name, "before": was, "after": is_, "change": share}
            )
    return found


def _by_key(rates: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[tuple[str, str, str], int]:
    return {(one["model"], one.get("tier", ""), name): one[name] for one in rates for name in names}
