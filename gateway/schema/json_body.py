"""Decodes bytes to one JSON object, by the same decoder for all modules: limiter, router and handler see the same
values.

It refuses input that parsers disagree about: doubled keys, NaN and infinities, integers beyond 64 bit, `-0`, lone
surrogates, byte order marks. It also refuses input that only costs: depth, and more values than any prompt needs. Depth
and values are counted before anything is decoded, in windows, so that no step holds the interpreter lock for long.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.base import errors

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
FEW_MEMBERS = 1000
"""The most members of a body that is decoded in pieces. Dividing an object of 100,000 members takes as long as decoding
it.
"""
INLINE_BYTES = 64 * 1024
"""The largest body that is decoded on the loop. Larger bodies are decoded off the loop."""

WINDOW = 1 << 16
"""The number of bytes of one step. A step holds the interpreter lock for a millisecond or two at the worst."""

_INT64_MIN, _UINT64_END = -(2**63), 2**64
_NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_NEGATIVE_ZERO = re.compile(rb"[^eE]-0[^0-9.eE]")
"""A negative zero, except in an exponent, where it is fine: `1e-0` is 1."""
_NULL = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
"""A null character in a text or a name: its escape, in front of which stands an even number of backslashes."""
_WHITESPACE = b" \t\n\r"
_MEMBERS = dict[str, msgspec.Raw]
_ELEMENTS = list[msgspec.Raw]
_TAIL = 3
"""The number of bytes repeated in front of the next window, so that a number cut by a window's end is found there."""


def decode_object(body: bytes) -> dict[str, Any]:
    """Decodes a body. Raises `ApiError` 400. Threads may call it at once."""
    num_members = _check_shape(body)
    try:
        value = _in_pieces(body) if num_members <= FEW_MEMBERS else msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        raise _invalid_json() from None
    if not isinstance(value, dict):
        raise errors.invalid("The request body must be a JSON object.", code="invalid_json")
    _check_values(value, num_members)
    return value


def decode_stored(body: bytes) -> dict[str, Any]:
    """Decodes a body whose texts SQL keeps or compares. They have no null character, which PostgreSQL takes in no text.
    Raises `ApiError` 400.
    """
    value = decode_object(body)
    if _NULL.search(body):
        field = next((name for name, part in value.items() if "\0" in name or _has_null(part)), None)
        raise errors.invalid("A text of the body contains a null character, which cannot be stored.", field)
    return value


def _has_null(part: Any) -> bool:
    return _NULL.search(msgspec.json.encode(part)) is not None


def _in_pieces(text: bytes) -> Any:
    """Decodes a text as `msgspec.json.decode` does, but in calls of some 64 KiB, between which other threads get the
    interpreter lock: one call over 390,000 token ids holds it for 9 ms. Only a string is decoded in one longer call.
    Objects and lists are first divided into the texts of their values, which is fast because nothing is made of them,
    but for objects with very many members.
    """
    text = text.strip(_WHITESPACE)
    if len(text) <= WINDOW or text[:1] not in b"[{":
        return msgspec.json.decode(text)
    if text[:1] == b"{":
        return {name: _in_pieces(bytes(item)) for name, item in msgspec.json.decode(text, type=_MEMBERS).items()}
    if all(text.find(char, 1) < 0 for char in (b'"', b"[", b"{")):
        return _numbers(text)
    found: list[Any] = []
    waiting: list[bytes] = []
    num_bytes = 0
    for item in map(bytes, msgspec.json.decode(text, type=_ELEMENTS)):
        if waiting and num_bytes + len(item) > WINDOW:
            found += msgspec.json.decode(b"[" + b",".join(waiting) + b"]")
            waiting, num_bytes = [], 0
        if len(item) > WINDOW:
            found.append(_in_pieces(item))
        else:
            waiting.append(item)
            num_bytes += len(item)
    return found + msgspec.json.decode(b"[" + b",".join(waiting) + b"]")


def _numbers(text: bytes) -> list[Any]:
    """Decodes a list without strings, lists and objects in it, divided at commas."""
    found: list[Any] = []
    start = 1
    while (comma := text.find(b",", start + WINDOW)) >= 0:
        piece = msgspec.json.decode(b"[" + text[start:comma] + b"]")
        if not piece:  # a comma without a value before it
            raise ValueError
        found += piece
        start = comma + 1
    rest = msgspec.json.decode(b"[" + text[start:])
    if start > 1 and not rest:
        raise ValueError
    found += rest
    return found


def _invalid_json(why: str = "") -> errors.ApiError:
    return errors.invalid(f"We could not parse the JSON body of your request.{why}", code="invalid_json")


def _too_many(what: str, most: int) -> errors.ApiError:
    return errors.invalid(f"The JSON body has too many {what}: at most {most:,} are allowed.", code="too_many_values")


def _check_shape(body: bytes) -> int:
    """Refuses by depth, numbers of brackets, members and values, and `-0`. Returns the number of members."""
    num_members = num_values = num_strings = num_brackets = depth = 0
    tail = b""
    for structure in _structure(body):
        num_colons = structure.count(b":")
        num_members += num_colons
        num_values += num_colons + structure.count(b",") + structure.count(b"{") + structure.count(b"[")
        num_strings += structure.count(b'"')
        brackets = structure.translate(None, _NOT_BRACKETS)
        num_brackets += len(brackets)
        for bracket in brackets[: MAX_BRACKETS + 1]:
            depth += 1 if bracket in b"[{" else -1
            if depth > MAX_DEPTH:
                raise _invalid_json(f" It is nested deeper than {MAX_DEPTH} levels.")
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
    return num_members


def _structure(body: bytes) -> Iterable[bytes]:
    """Yields the text outside of strings, window by window, with a quote in place of each string."""
    inside, place = 0, 0
    while place < len(body):
        window = body[place : place + WINDOW]
        num_backslashes = len(window) - len(window.rstrip(b"\\"))
        if num_backslashes % 2 and place + len(window) < len(body):
            window = window[:-1]  # the backslash belongs to the character after it
        place += len(window)
        parts = window.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b'"'.join(parts[inside::2])
        inside = (inside + len(parts) - 1) % 2


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
