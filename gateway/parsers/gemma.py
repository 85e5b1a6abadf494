"""Calls of FunctionGemma and Gemma 4: `call:f{city:…,days:3}` between two marks. Keys have no quotes, and a string stands
between two marks of its own. JSON is read, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gateway.parsers import json_call
from gateway.parsers.scan import Format, Scan, Wait, behind, json_text

MAX_DEPTH = 32


@dataclass(frozen=True)
class GemmaMarks:
    open: str
    close: str
    quote: str
    """The mark at both ends of a string."""


FUNCTION_GEMMA = GemmaMarks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA_4 = GemmaMarks("<|tool_call>", "<tool_call|>", '<|"|>')


def reader(marks: GemmaMarks) -> Format:
    return behind((marks.open,), partial(_call, marks))


def _call(marks: GemmaMarks, scan: Scan, _: str) -> Wait[bool]:
    if not (yield from scan.accept("call:")):
        return False
    name = yield from scan.word("{<\n")
    if not scan.takes_name(name) or (yield from scan.peek()) != "{":
        return False
    scan.begin(name)
    if (yield from _value(scan, marks.quote, 0)):
        scan.complete()
        yield from scan.spaces()
        yield from scan.accept(marks.close)
    return True


def _value(scan: Scan, quote: str, depth: int) -> Wait[bool]:
    """Writes one value as JSON. Returns whether it was whole."""
    yield from scan.spaces()
    if (yield from scan.accept(quote)):
        return (yield from scan.string(quote))
    first = yield from scan.peek()
    if first == "{" and depth < MAX_DEPTH:
        return (yield from _members(scan, quote, depth, "{", "}"))
    if first == "[" and depth < MAX_DEPTH:
        return (yield from _members(scan, quote, depth, "[", "]"))
    if first == '"':
        return (yield from json_call.value(scan, scan.argument))
    text = (yield from scan.word(",}]<\n")).strip()
    if json_call.decoded(text) is None and text != "null":
        text = json_text(text)  # a string without its marks
    scan.argument(text)
    return bool((yield from scan.peek()))


def _members(scan: Scan, quote: str, depth: int, opening: str, closing: str) -> Wait[bool]:
    """Writes an object or a list."""
    yield from scan.accept(opening)
    scan.argument(opening)
    separator = ""
    while True:
        yield from scan.spaces()
        if (yield from scan.accept(closing)):
            scan.argument(closing)
            return True
        if not (yield from scan.peek()):
            return False
        if separator and not (yield from scan.accept(",")):
            return False
        yield from scan.spaces()
        scan.argument(separator)
        separator = ", "
        if opening == "{" and not (yield from _key(scan, quote)):
            return False
        if not (yield from _value(scan, quote, depth + 1)):
            return False


def _key(scan: Scan, quote: str) -> Wait[bool]:
    """Writes the name of a member with its colon."""
    key: str | None
    if (yield from scan.accept(quote)):
        key, _ = yield from scan.before(quote)
    elif (yield from scan.peek()) == '"':
        key = yield from json_call.string(scan)
    else:
        key = (yield from scan.word(":,}]<\n")).strip()
    yield from scan.spaces()
    if not key or not (yield from scan.accept(":")):
        return False
    scan.argument(f"{json_text(key)}: ")
    return True
