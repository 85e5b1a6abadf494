"""Decodes bytes to one JSON object, by the same decoder for all modules: limiter, router and handler see the same
values.

It refuses input that parsers disagree about: doubled keys, NaN and infinities, integers beyond 64 bit, `-0`, lone
surrogates, byte order marks. It also refuses input that only costs: depth, and more values than any prompt needs. Depth
and values are counted before anything is decoded. Both passes go over the text in windows, so that no step holds the
interpreter lock for long: counting does, and decoding in pieces that are cut once in each window.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from gateway.base import errors
from gateway.intake.json_pieces import TO_CLOSING, Cut, decode_in_pieces

MAX_DEPTH = 32
MAX_BRACKETS = 100_000
"""The most brackets, opening and closing ones together."""
MAX_MEMBERS = 100_000
"""The most members of all objects: 10,000 messages with tool calls have fewer. A member costs a decoder ten times an
element.
"""
MAX_VALUES = 400_000
"""The most members, elements and containers: enough for a prompt of the longest usual context (262,144)
as token ids.
"""
INLINE_BYTES = 64 * 1024
"""The largest body that is decoded on the loop. Larger bodies are decoded off the loop."""

WINDOW = 16 * 1024
"""The number of bytes of one step. A step holds the interpreter lock for less than a millisecond."""

_INT64_MIN, _UINT64_END = -(2**63), 2**64
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_NEGATIVE_ZERO = re.compile(rb"[^eE]-0[^0-9.eE]")
"""A negative zero, except in an exponent, where it is fine: `1e-0` is 1."""
_NULL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""A null character in a text or a name: its escape, in front of which stands an even number of backslashes."""
_TAIL = 3
"""The number of bytes repeated in front of the next window, so that a number cut by a window's end is found there."""


def decode_object(body: bytes, cuts: list[Cut] | None = None) -> dict[str, Any]:
    """Decodes a body. Raises `ApiError` 400. Threads may call it at once. `cuts` are what `check` returned for this body;
    without them it is checked here.
    """
    if cuts is None:
        return _checked(body)[0]
    value: dict[str, Any] = decode_in_pieces(body, cuts)
    return value


def decode_stored(body: bytes, cuts: list[Cut] | None = None) -> dict[str, Any]:
    """Decodes a body whose texts SQL keeps or compares. They have no null character, which PostgreSQL takes in no text.
    Raises `ApiError` 400.
    """
    value = decode_object(body, cuts)
    if _NULL.search(body):
        field = next((name for name, part in value.items() if "\0" in name or _has_null(part)), None)
        raise errors.invalid("A text of the body contains a null character, which cannot be stored.", field)
    return value


def check(body: bytes) -> list[Cut]:
    """Raises `ApiError` 400 for what cannot be decoded. Returns where a body is cut when it is decoded."""
    return _checked(body)[1]


def _checked(body: bytes) -> tuple[dict[str, Any], list[Cut]]:
    num_members, cuts = _check_shape(body)
    try:
        value = decode_in_pieces(body, cuts)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise _invalid_json() from None
    if not isinstance(value, dict):
        raise errors.invalid("The request body must be a JSON object.", code="invalid_json")
    _check_values(value, num_members)
    return value, cuts


def _has_null(part: Any) -> bool:
    return _NULL.search(msgspec.json.encode(part)) is not None


def _invalid_json(why: str = "") -> errors.ApiError:
    return errors.invalid(f"We could not parse the JSON body of your request.{why}", code="invalid_json")


def _too_many(what: str, most: int) -> errors.ApiError:
    return errors.invalid(f"The JSON body has too many {what}: at most {most:,} are allowed.", code="too_many_values")


def _check_shape(body: bytes) -> tuple[int, list[Cut]]:
    """Refuses by depth, numbers of brackets, members and values, and `-0`. Returns the number of members, and cuts for
    decoding, at most one in a window.
    """
    num_members = num_values = num_strings = num_brackets = 0
    containers = bytearray()
    cuts: list[Cut] = []
    tail = b""
    for structure, comma in _windows(body):
        num_colons = structure.count(b":")
        num_members += num_colons
        num_values += num_colons + structure.count(b",") + structure.count(b"{") + structure.count(b"[")
        num_strings += structure.count(b'"')
        brackets = structure.translate(None, _NOT_BRACKETS)
        num_brackets += len(brackets)
        if comma is not None:
            num_before = len(structure[: structure.index(b",")].translate(None, _NOT_BRACKETS))
            _follow(brackets[:num_before], containers)
            brackets = brackets[num_before:]
            if containers:
                cuts.append(Cut(comma, bytes(containers)))
        _follow(brackets[: MAX_BRACKETS + 1], containers)
        if num_brackets > MAX_BRACKETS:
            raise _too_many("objects and lists", MAX_BRACKETS // 2)
        if num_members > MAX_MEMBERS:
            raise _too_many("members of objects", MAX_MEMBERS)
        if max(num_values, num_strings - num_members) > MAX_VALUES:
            raise _too_many("values", MAX_VALUES)
        # To look for these two bytes takes a fiftieth of what the expression takes.
        if (b"-0" in structure or b"-" in tail) and _NEGATIVE_ZERO.search(tail + structure):
            raise _invalid_json(" It has the number -0.")
        tail = structure[-_TAIL:]
    return num_members, cuts


def _follow(brackets: bytes, containers: bytearray) -> None:
    """Opens and closes containers as a text's brackets do. Raises `ApiError` if there are too many, or none to close."""
    for bracket in brackets:
        if bracket in b"[{":
            containers.append(bracket)
            if len(containers) > MAX_DEPTH:
                raise _invalid_json(f" It is nested deeper than {MAX_DEPTH} levels.")
        elif not containers or containers.pop() + TO_CLOSING != bracket:
            raise _invalid_json()


def _windows(body: bytes) -> Iterator[tuple[bytes, int | None]]:
    """Yields the text outside of strings, window by window, with a quote in place of each string; and the place of its
    first comma in the body, from the second window on.
    """
    inside, place = 0, 0
    while place < len(body):
        window = body[place : place + WINDOW]
        num_backslashes = len(window) - len(window.rstrip(b"\\"))
        if num_backslashes % 2 and place + len(window) < len(body):
            window = window[:-1]  # the backslash belongs to the character after it
        parts = window.replace(b"\\\\", b"__").replace(b'\\"', b"__").split(b'"')
        yield b'"'.join(parts[inside::2]), _first_comma(parts, inside, place) if place else None
        place += len(window)
        inside = (inside + len(parts) - 1) % 2


def _first_comma(parts: list[bytes], inside: int, place: int) -> int | None:
    """Returns the place of the first comma outside of strings. Every other part is a string's; quotes stand between."""
    for number, part in enumerate(parts):
        if number % 2 == inside and (found := part.find(b",")) >= 0:
            return place + found
        place += len(part) + 1
    return None


def _check_values(value: dict[str, Any], num_members: int) -> None:
    """Refuses what the decoder accepts: doubled keys, of which the decoder keeps one, and integers beyond 64 bit."""
    num_found = 0
    containers: list[dict[str, Any] | list[Any]] = [value]
    while containers:
        container = containers.pop()
        items: Iterable[Any] = container
        if isinstance(container, dict):
            num_found += len(container)
            items = container.values()
        for item in items:
            kind = type(item)
            if kind is int:
                if not _INT64_MIN <= item < _UINT64_END:
                    raise _invalid_json(" It has an integer beyond 64 bits.")
            elif kind is dict or kind is list:
                containers.append(item)
    if num_found != num_members:
        raise _invalid_json(" An object has a key twice.")
