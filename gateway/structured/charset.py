"""Sets of characters, and their notation in the expressions that the grammar library reads.

The module is pure. A set is a sorted tuple of disjoint inclusive ranges of code points; surrogates are in none of them.
"""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]

ALL: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))


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
    return without(one, without(((0, 0x10FFFF),), other))


def chars(text: str) -> Ranges:
    return union((ord(char), ord(char)) for char in text)


def one_of(ranges: Ranges) -> str:
    """Returns an expression of one character of the set. An expression of an empty set matches nothing."""
    if not ranges:
        return "[a&&b]"
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return char(ranges[0][0])
    return f"[{''.join(_range(low, high) for low, high in ranges)}]"


_ESCAPED = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_NOT_PLAIN: Ranges = ((0, 31), (0x22, 0x22), (0x5C, 0x5C))


def in_json(ranges: Ranges) -> str:
    """Returns an expression of one character of the set as it stands in a string of JSON. Control characters that only
    `\\u` writes are left out: if no other is in the set, `ValueError`.
    """
    plain = without(ranges, _NOT_PLAIN)
    letters = "".join(letter for one, letter in _ESCAPED.items() if common(ranges, chars(one)))
    if not letters:
        if not plain:
            raise ValueError("a control character has no short escape in JSON")
        return one_of(plain)
    escape = char(0x5C) + one_of(chars(letters))
    return f"(?:{one_of(plain)}|{escape})" if plain else escape


def literal(text: str) -> str:
    """Returns an expression of a fixed text."""
    return "".join(char(ord(one)) for one in text)


def char(code: int) -> str:
    """Returns ASCII letters, digits and spaces as they are and everything else by number, so that no character has a
    meaning in an expression, in a class, or in the grammar around it.
    """
    one = chr(code)
    return one if one == " " or (one.isascii() and one.isalnum()) else f"\\u{{{code:x}}}"


def _range(low: int, high: int) -> str:
    return char(low) if low == high else f"{char(low)}-{char(high)}"
