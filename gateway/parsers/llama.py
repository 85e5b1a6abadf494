"""Calls that are the whole answer, behind an optional mark: JSON objects, or calls in Python's notation (Llama 3 and 4,
LFM2, OLMo 3).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import partial
from typing import Any

from gateway.parsers import json_call
from gateway.parsers.scan import Scan, Wait, behind
from gateway.schema.forms import MAX_TOOL_NAME

MARKS = ("<|python_tag|>", "<|python_start|>")
END = "<|python_end|>"
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
OLMO3 = ("<function_calls>", "</function_calls>")
MAX_CHARS = 64 * 1024
"""The longest call in Python's notation; a longer one is text."""
MAX_DEPTH = 32


def llama(scan: Scan) -> Wait[None]:
    """Reads calls at the begin of the answer, and behind a mark at any place: JSON, or `[f(a=1), g(b="x")]`."""
    scan.keep()
    yield from scan.spaces()
    mark = yield from scan.accept(*MARKS)
    while True:
        if not (yield from (_either if mark else _unmarked)(scan)):
            scan.give_up(*MARKS)
        if scan.is_over:
            return
        while (mark := (yield from scan.up_to((*MARKS, END), scan.text))) == END:
            pass
        if not mark:
            return
        scan.keep(mark)


def _between(end: str, read: Callable[[Scan], Wait[bool]], scan: Scan, _: str) -> Wait[bool]:
    """Reads calls up to the mark behind them, which may be missing."""
    yield from scan.spaces()
    if not (yield from read(scan)):
        return False
    yield from scan.spaces()
    yield from scan.accept(end)
    return True


def _lines(scan: Scan) -> Wait[bool]:
    if (yield from scan.peek()) in ("{", "["):
        return (yield from _either(scan))
    num = 0
    while (yield from _python_call(scan)):
        num += 1
        if scan.is_over:
            return True
        scan.keep()
        if "\n" not in (yield from scan.spaces()) or (yield from scan.peek()) in ("<", ""):
            scan.drop()
            return True
    if num:
        scan.text(scan.restore())
    return num > 0


def _either(scan: Scan) -> Wait[bool]:
    """Reads calls behind a mark, where one in Llama's own notation may stand, too."""
    yield from scan.spaces()
    if (yield from scan.peek()) in ("{", "["):
        return (yield from _unmarked(scan))
    return (yield from _call(scan, ".(\n ", ".call("))


def _unmarked(scan: Scan) -> Wait[bool]:
    yield from scan.spaces()
    first = yield from scan.peek()
    if first == "{":
        return (yield from json_call.calls(scan, (";", ",")))
    return first == "[" and (yield from _python_list(scan))


def _python_list(scan: Scan) -> Wait[bool]:
    """Reads calls in brackets; a list of JSON calls is one, too."""
    if not (yield from scan.accept("[")):
        return False
    yield from scan.spaces()
    if (yield from scan.peek()) == "{":
        return (yield from json_call.calls(scan, (",",), "]"))
    return (yield from json_call.calls(scan, (",",), "]", _python_call))


def _python_call(scan: Scan) -> Wait[bool]:
    return (yield from _call(scan, "(,]) \n\"'", "("))


def _call(scan: Scan, ends: str, opening: str) -> Wait[bool]:
    """Reads `name(key="value")`, or what else the opening is. The name has none of the characters `ends`."""
    name = yield from scan.word(ends, most=MAX_TOOL_NAME)
    if not scan.takes_name(name) or not (yield from scan.accept(opening)):
        return False
    found = _keywords(f"f({(yield from _balanced(scan))}")
    if found is None:
        return False
    return scan.call(name, found)


def _balanced(scan: Scan) -> Wait[str]:
    """Reads up to the bracket that ends a call, which is read too."""
    pieces: list[str] = []
    depth, quote = 1, ""
    while depth and len(pieces) < MAX_CHARS and depth < MAX_DEPTH and (one := (yield from scan.char())):
        pieces.append(one)
        if quote:
            if one == "\\":
                pieces.append((yield from scan.char()))
            elif one == quote:
                quote = ""
        elif one in "\"'":
            quote = one
        elif one in "([{":
            depth += 1
        elif one in ")]}":
            depth -= 1
    return "".join(pieces)


_WORDS = {"true": True, "false": False, "null": None}


def _keywords(source: str) -> dict[str, Any] | None:
    """Returns the keyword arguments of a call in Python's notation, whose values are literals; None for anything else."""
    try:
        node = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
        return None
    try:
        return {one.arg: _literal(one.value) for one in node.keywords if one.arg is not None}
    except (ValueError, RecursionError):
        return None


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | bool() | None as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {str(_literal(key)): _literal(value) for key, value in zip(keys, values, strict=True) if key}
    raise ValueError("no literal")


lfm2 = behind(LFM2[:1], partial(_between, LFM2[1], _either))
"""The format `[f(a=1), g(b="x")]` between two marks."""
olmo3 = behind(OLMO3[:1], partial(_between, OLMO3[1], _lines))
"""The format of calls between two tags, one on each line."""
