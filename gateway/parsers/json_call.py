"""JSON inside of a model's output: one value, and a call written as an object with a name and arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from gateway.parsers.scan import Scan, Wait

ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "tool_name")
_KEYS = (*_NAMES, *ARGUMENTS, "id", "tool_call_id", "type")
"""The members of a call. An object with any other is none, so that other JSON does not wait for its end."""


def value(scan: Scan, write: Callable[[str], None]) -> Wait[bool]:
    """Reads and writes one value by its brackets and quotes. Returns whether its end was found."""
    depth = 0
    while one := (yield from scan.peek()):
        if one == '"':
            write((yield from scan.char()))
            if not (yield from _rest_of_string(scan, write)):
                return False
        elif one in "{[":
            depth += 1
            write((yield from scan.char()))
        elif one in "}]" and depth:
            depth -= 1
            write((yield from scan.char()))
        elif depth:
            yield from scan.run('"{[}]', write)
            continue
        else:  # a number or a name, which ends where something else begins
            text = yield from scan.word(",}] \n\r\t")
            write(text)
            return bool(text)
        if not depth:
            return True
    return False


def _rest_of_string(scan: Scan, write: Callable[[str], None]) -> Wait[bool]:
    while end := (yield from scan.run('"\\', write)):
        write((yield from scan.char()))
        if end == '"':
            return True
        write((yield from scan.char()))
    return False


def text_of(scan: Scan, read: Callable[[Scan, Callable[[str], None]], Wait[bool]] = value) -> Wait[str]:
    """Reads one value and returns its text; "" if it has no end."""
    pieces: list[str] = []
    return "".join(pieces) if (yield from read(scan, pieces.append)) else ""


def string(scan: Scan) -> Wait[str | None]:
    if (yield from scan.peek()) != '"':
        return None
    found = decoded((yield from text_of(scan)))
    return found if isinstance(found, str) else None


def decoded(text: str) -> Any:
    """Returns the value of a JSON text, or None."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def arguments(scan: Scan, name: str) -> Wait[None]:
    """Begins a call whose arguments come next, and writes them as they come. A part that is no JSON stays incomplete."""
    scan.begin(name)
    pieces: list[str] = []

    def write(text: str) -> None:
        pieces.append(text)
        scan.argument(text)

    if (yield from value(scan, write)) and isinstance(decoded("".join(pieces)), dict):
        scan.complete()


def call(scan: Scan) -> Wait[bool]:
    """Reads an object with `name` and `arguments`. Returns False if it is no call of an offered tool; nothing was begun
    then.
    """
    if not (yield from scan.accept("{")):
        return False
    name, early, has_begun = "", "", False
    while True:
        yield from scan.spaces()
        if (yield from scan.accept("}")):
            break
        yield from scan.accept(",")
        yield from scan.spaces()
        key = yield from string(scan)
        yield from scan.spaces()
        if key not in _KEYS or not (yield from scan.accept(":")):
            return has_begun
        yield from scan.spaces()
        if key in _NAMES and not has_begun:
            name = (yield from string(scan)) or ""
            if not scan.takes_name(name):
                return False
        elif key in ARGUMENTS and name and not has_begun and (yield from scan.peek()) == "{":
            yield from arguments(scan, name)
            has_begun = True
        else:
            text = yield from text_of(scan)
            if not text:
                return has_begun
            early = text if key in ARGUMENTS else early
    return has_begun or _late(scan, name, early)


def _late(scan: Scan, name: str, text: str) -> bool:
    """Writes a call whose arguments came before its name, came as a text that holds JSON, or did not come at all."""
    found = {} if text in ("", "null") else decoded(text)
    found = decoded(found) if isinstance(found, str) else found
    if not name or not isinstance(found, dict):
        return False
    return scan.call(name, found)


def calls(
    scan: Scan, separators: Sequence[str], end: str = "", read: Callable[[Scan], Wait[bool]] = call
) -> Wait[bool]:
    """Reads calls with separators between them, and the `end` after them if it is there. Returns whether there was at
    least one call; what follows the last one and is none is a text.
    """
    num = 0
    while (yield from read(scan)):
        num += 1
        if scan.is_over:
            return True
        scan.keep()
        yield from scan.spaces()
        if not (yield from scan.accept(*separators)):
            if end and (yield from scan.accept(end)):
                scan.drop()
                return True
            break
        yield from scan.spaces()
    if num:
        scan.text(scan.restore())
    return num > 0
