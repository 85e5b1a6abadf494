"""Micro-units as decimals of at most six places, written and read as integers and never through a float."""

from __future__ import annotations

import re

from accounting.values.budget_types import MAX_AMOUNT

MICRO_UNITS = 1_000_000
LARGEST_BARE = 999
"""The largest amount without a decimal point. A larger one needs its point: older versions took whole numbers of
micro-units.
"""
MILLIONTHS = 10_000
"""Millionths in a percent."""
_PERCENT = re.compile(r"(?P<whole>[0-9]{1,3})(\.(?P<places>[0-9]{1,4}))?", re.ASCII)
_AMOUNT = re.compile(r"(?P<sign>-?)(?P<whole>[0-9]+)(\.(?P<places>[0-9]+))?")


def micro_units(text: str) -> int:
    """Returns 25,000,000 for `25.00`. Raises ValueError with a sentence for the person who typed it."""
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an amount like 25.00: only digits and one decimal point are allowed.")
    whole, places = match["whole"], match["places"]
    if places is None and int(whole) > LARGEST_BARE:
        meant = decimal(int(whole), 2)
        raise ValueError(
            f"{text} may mean two things: write {text}.00 if you mean that much of the currency,"
            f" {match['sign']}{meant} if you mean micro-units."
        )
    if len(places or "") > 6:
        raise ValueError(f"{text} has more than 6 decimals.")
    amount = int(whole) * MICRO_UNITS + int((places or "").ljust(6, "0"))
    if amount > MAX_AMOUNT:
        raise ValueError(f"{text} is too much: at most {decimal(MAX_AMOUNT)} fits.")
    return -amount if match["sign"] else amount


def decimal(micro_units: int, min_places: int = 0) -> str:
    """Returns `-1.5` for -1,500,000, with at least `min_places` places."""
    whole, rest = divmod(abs(micro_units), MICRO_UNITS)
    places = f"{rest:06d}".rstrip("0").ljust(min_places, "0")
    sign = "-" if micro_units < 0 else ""
    return f"{sign}{whole}.{places}" if places else f"{sign}{whole}"


def tax_rate(percent: str) -> int:
    """Returns 190,000 millionths for `19`. Raises ValueError with a sentence for the person who typed it."""
    match = _PERCENT.fullmatch(percent)
    rate = 0 if match is None else int(match["whole"]) * MILLIONTHS + int((match["places"] or "").ljust(4, "0"))
    if match is None or rate > 100 * MILLIONTHS:
        raise ValueError(f"{percent!r} is not a percentage from 0 to 100 with at most 4 decimals, like 19 or 8.1.")
    return rate


def percentage(tax_rate: int) -> str:
    """Returns `8.1` for 81,000 millionths."""
    whole, rest = divmod(tax_rate, MILLIONTHS)
    return f"{whole}.{rest:04d}".rstrip("0").rstrip(".")


def grouped(micro_units: int) -> str:
    """Formats an amount for people, in columns: `1,234.500000`."""
    whole, _, places = decimal(abs(micro_units), 6).partition(".")
    sign = "\u2212" if micro_units < 0 else ""
    return f"{sign}{int(whole):,}.{places}"


def in_units(micro_units: int, places: int) -> str:
    """Formats an amount that can be paid, with the decimals of its currency: `1,234.50`."""
    whole, _, rest = grouped(micro_units).partition(".")
    return f"{whole}.{rest[:places]}" if places else whole
