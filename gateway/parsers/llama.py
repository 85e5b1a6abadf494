"""Calls that are the whole answer, behind an optional mark: JSON objects, or calls in Python's notation (Llama 3 and 4,
LFM2, OLMo 3).
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from gateway.parsers import json_call
from gateway.parsers.scan import Scan, Wait

MARKS = ("<|python_tag|>", "<|python_start|>")
END = "<|python_end|>"
LFM2 = ("<|tool_call_start|>", "<|tool_call_end|>")
OLMO3 = ("<function_calls>", "</function_calls>")
MAX_CHARS = 64 * 1024
"""The longest call in Python's notation; a longer one is text."""
MAX_DEPTH = 32


def llama(scan: Scan) -> Wait[None]:
    """Reads calls at the begin of the answer, and behind a mark at any place."""
    yield from _rest(scan, _either)


def pythonic(scan: Scan) -> Wait[None]:
    """Reads `[f(a=1), g(b="x")]` at the begin of the answer; a JSON call is one, too."""
    yield from _rest(scan, _either)


def lfm2(scan: Scan) -> Wait[None]:
    """Reads `[f(a=1), g(b="x")]` between two marks."""
    yield from _between(scan, LFM2, _either)


def olmo3(scan: Scan) -> Wait[None]:
    """Reads calls between two tags, one on each line."""
    yield from _between(scan, OLMO3, _lines)


def _between(scan: Scan, marks: tuple[str, str], read: Callable[[Scan, bool], Wait[bool]]) -> Wait[None]:
    begin, end = marks
    while tag := (yield from scan.up_to((begin,), scan.text)):
        scan.keep(tag)
        yield from scan.spaces()
        if (yield from read(scan, True)):
            yield from scan.spaces()
            yield from scan.accept(end)
        else:
            scan.text(scan.restore())
        if scan.is_over:
            return


def _lines(scan: Scan, is_marked: bool) -> Wait[bool]:
    if (yield from scan.peek()) in ("{", "["):
        return (yield from _either(scan, is_marked))
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


def _rest(scan: Scan, read: Callable[[Scan, bool], Wait[bool]]) -> Wait[None]:
    scan.keep()
    yield from scan.spaces()
    mark = yield from scan.accept(*MARKS)
    while True:
        if not (yield from read(scan, bool(mark))):
            scan.text(scan.restore())
        if scan.is_over:
            return
        while (mark := (yield from scan.up_to((*MARKS, END), scan.text))) == END:
            pass
        if not mark:
            return
        scan.keep(mark)


def _either(scan: Scan, is_marked: bool) -> Wait[bool]:
    yield from scan.spaces()
    first = yield from scan.peek()
    if first == "{":
        return (yield from json_call.calls(scan, (";", ",")))
    if first == "[":
        return (yield from _python_list(scan, is_marked))
    return is_marked and (yield from _built_in(scan))


def _python_list(scan: Scan, is_marked: bool) -> Wait[bool]:
    """Reads calls in brackets; a list of JSON calls is one, too."""
    if not (yield from scan.accept("[")):
        return False
    yield from scan.spaces()
    if (yield from scan.peek()) == "{":
        return (yield from json_call.calls(scan, (",",), "]"))
    num = 0
    while (yield from _python_call(scan)):
        num += 1
        if scan.is_over:
            return True
        scan.keep()
        yield from scan.spaces()
        if (yield from scan.accept("]")):
            scan.drop()
            return True
        if not (yield from scan.accept(",")):
            break
        yield from scan.spaces()
    if num:
        scan.text(scan.restore())
    return num > 0


def _python_call(scan: Scan) -> Wait[bool]:
    name = yield from scan.word("(,]) \n\"'", most=64)
    if not scan.may_begin(name) or not (yield from scan.accept("(")):
        return False
    text = yield from _balanced(scan)
    found = _keywords(f"f({text}")
    if found is None:
        return False
    scan.call(name, found)
    return True


def _built_in(scan: Scan) -> Wait[bool]:
    """Reads `name.call(key="value")`."""
    name = yield from scan.word(".(\n ", most=64)
    if not scan.may_begin(name) or not (yield from scan.accept(".call(")):
        return False
    found = _keywords(f"f({(yield from _balanced(scan))}")
    if found is None:
        return False
    scan.call(name, found)
    return True


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
