"""Sets of characters, and their notation in a grammar: as raw text, or inside a JSON string, where some need an escape.

Pure. A set is a sorted tuple of disjoint inclusive ranges of code points; surrogates are in none of them.
"""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]

ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_ESCAPED = {0x22: '\\"', 0x5C: "\\\\", 0x08: "\\b", 0x0C: "\\f", 0x0A: "\\n", 0x0D: "\\r", 0x09: "\\t"}


def union(parts: Iterable[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def without(ranges: Ranges, taken: Ranges) -> Ranges:
    left: list[tuple[int, int]] = []
    for low, high in ranges:
        for first, last in taken:
            if last < low or first > high:
                continue
            if first > low:
                left.append((low, first - 1))
            low = last + 1
        if low <= high:
            left.append((low, high))
    return tuple(left)


def common(one: Ranges, other: Ranges) -> Ranges:
    return without(one, without(ALL, other))


def chars(text: str) -> Ranges:
    return union((ord(char), ord(char)) for char in text)


_CONTROLS: Ranges = ((0, 0x1F),)
IN_STRING: Ranges = without(ALL, union((*_CONTROLS, *chars('"\\'))))
"""The characters that need no escape in a JSON string."""


def raw(ranges: Ranges) -> str:
    """Returns a grammar of one character of the set. The set must not be empty."""
    return f"[{''.join(_range(low, high) for low, high in ranges)}]"


def in_json(ranges: Ranges) -> str:
    """Returns a grammar of one character of the set as it appears in a JSON string, escaped where it must be."""
    parts = []
    if plain := common(ranges, IN_STRING):
        parts.append(raw(plain))
    special = without(ranges, IN_STRING)
    parts += [literal(_ESCAPED.get(code) or f"\\u{code:04x}") for low, high in special for code in range(low, high + 1)]
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def literal(text: str) -> str:
    """Returns a grammar of a fixed text."""
    return '"' + "".join(_in_literal(char) for char in text) + '"'


def _in_literal(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if char >= " " and char != "\x7f" else f"\\u{ord(char):04x}"


def _range(low: int, high: int) -> str:
    return _in_class(low) if low == high else f"{_in_class(low)}-{_in_class(high)}"


def _in_class(code: int) -> str:
    """Returns a character for a class: ASCII letters, digits and characters beyond ASCII as they are, others by number,
    so that no special character of a class has to be escaped.
    """
    return chr(code) if code >= 128 or chr(code).isalnum() else f"\\u{code:04x}"
