"""Integers between two bounds, as a grammar over digits. Pure."""

from __future__ import annotations

from gateway.structured.charset import literal

MAX_DIGITS = 18
"""The most digits of an integer without bounds: 64 bits hold it, so that every client can read it."""
LIMIT = 10**MAX_DIGITS - 1


def between(low: int, high: int) -> str:
    """Returns a grammar of the decimal integers `low` .. `high`, both included; low <= high."""
    parts: list[str] = []
    if low < 0:
        negative = _digits(max(1, -high), -low) if high < 0 else _digits(1, -low)
        parts.append(f'"-" ({" | ".join(negative)})')
    if high >= 0:
        parts += _digits(max(0, low), high)
    return f"({' | '.join(parts)})"


def _digits(low: int, high: int) -> list[str]:
    """Returns the alternatives for 0 <= low <= high."""
    parts: list[str] = []
    while len(str(low)) < len(str(high)):
        last = 10 ** len(str(low)) - 1
        parts += _same_length(str(low), str(last))
        low = last + 1
    return parts + _same_length(str(low), str(high))


def _same_length(low: str, high: str) -> list[str]:
    if low == high:
        return [literal(low)]
    if low[0] == high[0]:
        return [f"{literal(low[0])} ({' | '.join(_same_length(low[1:], high[1:]))})"]
    rest = len(low) - 1
    if not rest:
        return [_some(low, high)]
    parts: list[str] = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        parts.append(f"{literal(low[0])} ({' | '.join(_same_length(low[1:], '9' * rest))})")
        first += 1
    ends = high[1:] != "9" * rest
    if first <= last - ends:
        parts.append(f"{_some(str(first), str(last - ends))} [0-9]{{{rest}}}")
    if ends:
        parts.append(f"{literal(high[0])} ({' | '.join(_same_length('0' * rest, high[1:]))})")
    return parts


def _some(low: str, high: str) -> str:
    return f"[{low}-{high}]" if low != high else literal(low)
