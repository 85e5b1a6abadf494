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

MAX_DEPTH = 32
MAX_BRACKETS = 200_000
INLINE_BYTES = 64 * 1024
"""Larger bodies are decoded off the loop."""

# A whole string, or one bracket. Possessive, so a broken string costs no backtracking.
_TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"|[\[{]|[\]}]', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def decode_object(body: bytes) -> dict[str, Any]:
    """Raises `ApiError` 400. Pure, and thread-safe."""
    _check_shape(body)
    try:
        if _SURROGATE.search(body):
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
    depth = num_brackets = 0
    for match in _TOKEN.finditer(body):
        first = body[match.start()]
        if first == 0x22:  # a string
            continue
        num_brackets += 1
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH or num_brackets > MAX_BRACKETS:
                raise _invalid_json(" It is nested too deeply or has too many parts.")
        else:
            depth -= 1


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
