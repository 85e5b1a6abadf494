"""Micro-units as decimals of at most six places, written from the integer and never through a float."""

from __future__ import annotations

MICRO_UNITS = 1_000_000


def decimal(micro_units: int, min_places: int = 0) -> str:
    """`-1.5` for -1,500,000; at least so many places."""
    whole, rest = divmod(abs(micro_units), MICRO_UNITS)
    places = f"{rest:06d}".rstrip("0").ljust(min_places, "0")
    sign = "-" if micro_units < 0 else ""
    return f"{sign}{whole}.{places}" if places else f"{sign}{whole}"


def grouped(micro_units: int) -> str:
    """For people, in columns: `1,234.500000`."""
    whole, _, places = decimal(abs(micro_units), 6).partition(".")
    sign = "\u2212" if micro_units < 0 else ""
    return f"{sign}{int(whole):,}.{places}"
