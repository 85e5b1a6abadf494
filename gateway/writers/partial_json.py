"""The complete part of a JSON object whose text may have been cut. The module is pure."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_TOKEN = re.compile(
    r"""\s*(?:(?P<open>[{\[])|(?P<close>[}\]])|(?P<mark>[,:])|(?P<string>"[^"\\]*(?:\\.[^"\\]*)*")"""
    r"""|(?P<scalar>(?:-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null)(?=[\s,\]}]|$)))"""
)


def complete_prefix(text: str) -> dict[str, Any]:
    """Returns the object of `text`. If the text ends inside of the object, its unfinished last value is left out: this
    is what a client has that reads a stream of the same text.
    """
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return msgspec.json.decode(_closed(text), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _closed(text: str) -> str:
    """Returns the text up to its last complete value, with the brackets that are still open closed."""
    open_brackets: list[str] = []
    place, end, at_key = 0, 0, False
    while (token := _TOKEN.match(text, place)) is not None:
        place = token.end()
        is_value = True
        if token["open"]:
            open_brackets.append("}" if token["open"] == "{" else "]")
            at_key = token["open"] == "{"
        elif token["close"]:
            if open_brackets[-1:] != [token["close"]]:
                break
            open_brackets.pop()
            at_key = False
        elif token["mark"]:
            is_value, at_key = False, token["mark"] == "," and open_brackets[-1:] == ["}"]
        elif at_key:
            is_value, at_key = False, False
        if is_value:
            end = place
    # A bracket is part of a value, so none was opened or closed after the last value.
    return text[:end] + "".join(reversed(open_brackets))
