"""Bytes → one JSON object, by one decoder for all rooms: limiter, router and handler see the same values.

Refuses what parsers disagree about: doubled keys, NaN and infinities, integers beyond 64 bit, `-0`, lone
surrogates, byte order marks; and what only costs: depth above 32, more than 200,000 brackets.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import msgspec

from gateway import errors

_QUOTE = ord('"')

MAX_DEPTH = 32
MAX_BRACKETS = 200_000
INLINE_BYTES = 64 * 1024
"""Larger bodies are decoded off the loop."""

WINDOW = 1 << 18
"""One search holds the interpreter lock; this bounds for how long."""

_OUTSIDE = re.compile(rb'["\[{\]}]')
# Possessive, so a broken string costs no backtracking.
_INSIDE = re.compile(rb'[^"\\]{0,262144}+(?:\\.[^"\\]*+){0,1000}+', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def decode_object(body: bytes) -> dict[str, Any]:
    """Raises `ApiError` 400. Pure, and thread-safe."""
    _check_shape(body)
    try:
        if _has_surrogates(body):
            msgspec.json.decode(
                body
            )  # refuses lone surrogates, which the decoder below lets through
        value = json.loads(
            body.decode(),
            object_pairs_hook=_without_doubles,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_refuse_constant,
        )
    except (
        ValueError,
        RecursionError,
    ):  # UnicodeDecodeError, JSONDecodeError and ours are ValueErrors
        raise _invalid_json() from None
    if not isinstance(value, dict):
        raise errors.invalid("The request body must be a JSON object.", code="invalid_json")
    return value


def _invalid_json(why: str = "") -> errors.ApiError:
    return errors.invalid(
        f"We could not parse the JSON body of your request.{why}", code="invalid_json"
    )


def _check_shape(body: bytes) -> None:
    """Depth and number of brackets, before any parser recurses."""
    depth = num_brackets = place = 0
    while (match := _OUTSIDE.search(body, place)) is not None:
        place = match.end()
        char = body[match.start()]
        if char == _QUOTE:
            place = _end_of_string(body, place)
            continue
        num_brackets += 1
        depth += 1 if char in b"[{" else -1
        if depth > MAX_DEPTH or num_brackets > MAX_BRACKETS:
            raise _invalid_json(" It is nested too deeply or has too many parts.")


def _end_of_string(body: bytes, place: int) -> int:
    """Behind the closing quote; the end of the body if there is none."""
    while place < len(body):
        match = _INSIDE.match(body, place)
        assert match is not None, "it matches nothing, too"
        end = match.end()
        if body[end : end + 1] == b'"':
            return end + 1
        if end == place:
            return len(body)  # a backslash at the very end
        place = end
    return place


def _has_surrogates(body: bytes) -> bool:
    return any(
        _SURROGATE.search(body, start, start + WINDOW + 4) for start in range(0, len(body), WINDOW)
    )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("doubled key")
    return value


def _integer(text: str) -> int:
    if len(text) > 20 or text == "-0":
        raise ValueError("integer out of range")
    value = int(text)
    if not -(2**63) <= value < 2**64:
        raise ValueError("integer out of range")
    return value


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError("number out of range")
    return value


def _refuse_constant(text: str) -> float:
    raise ValueError(text)
