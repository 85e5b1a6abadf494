"""Tools of the type `custom`, whose input is a text. A model writes such a call as it writes all others: as a function
with one argument, the text. The call is always enforced, so the argument is there and has the form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.base import errors
from gateway.schema import forms
from gateway.structured import lark_reader
from gateway.structured.lark import of_own
from gateway.structured.regex import RegexError, anywhere
from gateway.structured.rules import Rules

INPUT = "input"
"""The name of the argument."""
MAX_DEFINITION_CHARS = 16 * 1024
MAX_LARK_CHARS = 64 * 1024
"""The most characters of all definitions in Lark's syntax together. Each may be several objects while its
request waits, and workers compile no larger grammar anyway."""

Name = Annotated[str, Meta(pattern=forms.TOOL_NAME)]
"""The name of a tool. Where a namespace is put in front, the whole has this form."""


class Grammar(msgspec.Struct, frozen=True):
    syntax: Literal["lark", "regex"]
    definition: Annotated[str, Meta(max_length=MAX_DEFINITION_CHARS)]


class Format(msgspec.Struct, frozen=True):
    type: Literal["text", "grammar"]
    grammar: Grammar | None = None


class CustomTool(msgspec.Struct, frozen=True):
    name: Name
    description: str | None = None
    format: Format | None = None


def parameters_of(tool: CustomTool, where: str) -> dict[str, Any]:
    """Returns the schema of the arguments. `where` is the place of the tool's format. Raises `ApiError` 400."""
    text: dict[str, Any] = {"type": "string", "description": "The whole input, as plain text."}
    grammar = _grammar(tool, where)
    if grammar is not None and grammar.syntax == "lark":
        text["description"] += f" It has the form of this Lark grammar:\n{grammar.definition}"
    elif grammar is not None:
        text["pattern"] = _pattern(grammar, where)
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def check_size(tools: Iterable[CustomTool]) -> None:
    """Raises `ApiError` 400 if the grammars in Lark's syntax are too large together."""
    grammars = (tool.format.grammar for tool in tools if tool.format is not None and tool.format.type == "grammar")
    if sum(len(one.definition) for one in grammars if one is not None and one.syntax == "lark") > MAX_LARK_CHARS:
        message = f"The Lark grammars of all tools have more than {MAX_LARK_CHARS // 1024} Ki characters."
        raise errors.invalid(message, "tools", "unsupported_schema")


def rules_of(tool: CustomTool, where: str) -> Rules | None:
    """Returns the rules of the input; None for a tool without a grammar in Lark's syntax. Raises `ApiError` 400."""
    grammar = _grammar(tool, where)
    if grammar is None or grammar.syntax != "lark":
        return None
    try:
        rules = lark_reader.read(grammar.definition)
        of_own(rules, "own")
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise errors.invalid(
            f"This Lark grammar cannot be enforced: {why}.", f"{where}.grammar.definition", "unsupported_schema"
        ) from None
    return rules


def _grammar(tool: CustomTool, where: str) -> Grammar | None:
    if tool.format is None or tool.format.type != "grammar":
        return None
    if tool.format.grammar is None:
        param = f"{where}.grammar"
        raise errors.invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    return tool.format.grammar


def _pattern(grammar: Grammar, where: str) -> str:
    pattern = _whole(grammar.definition)
    try:
        anywhere(pattern)
    except RegexError as error:
        raise errors.invalid(str(error), f"{where}.grammar.definition", "unsupported_schema") from None
    return pattern


_UNITS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|.", re.DOTALL)
"""The units of an expression: an escape, a class, or a character. A class that is not closed is one too: each bracket of
many would else be looked at to the end."""


def _whole(definition: str) -> str:
    """Returns an expression that matches the same texts and nothing around them. Anchors at the ends of an expression
    without alternatives are its own.
    """
    units = _UNITS.findall(definition)
    depth, has_choice = 0, False
    for unit in units:
        depth += (unit == "(") - (unit == ")")
        has_choice |= unit == "|" and depth == 0
    if not has_choice:
        units = units[1:] if units[:1] == ["^"] else units
        units = units[:-1] if units[-1:] == ["$"] else units
    return f"^(?:{''.join(units)})$"


def arguments_of(text: str) -> str:
    """Returns the arguments of a call with this input, as JSON."""
    return msgspec.json.encode({INPUT: text}).decode()


_HEAD = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f"}


class InputText:
    """Reads the input out of a call's arguments, which come in pieces: `{"input": "…"}`."""

    def __init__(self) -> None:
        self._held = ""
        self._is_inside = False
        self._has_ended = False

    def push(self, piece: str) -> str:
        """Returns the text that became certain."""
        if self._has_ended:
            return ""
        self._held += piece
        if not self._is_inside:
            head = _HEAD.match(self._held)
            if head is None:
                return ""
            self._held, self._is_inside = self._held[head.end() :], True
        found: list[str] = []
        place = 0
        while place < len(self._held):
            one = self._held[place]
            if one == '"':
                self._has_ended = True
                break
            text, size = (one, 1) if one != "\\" else _escape(self._held, place)
            if not size:
                break  # half an escape
            found.append(text)
            place += size
        self._held = self._held[place:]
        return "".join(found)


def _escape(text: str, place: int) -> tuple[str, int]:
    """Returns the character that an escape stands for, and its length; 0 while the escape is not whole."""
    kind = text[place + 1 : place + 2]
    if kind != "u":
        return _ESCAPES.get(kind, kind), 2 if kind else 0
    code = _unit(text, place)
    if code is None:
        return "", 0
    if not 0xD800 <= code < 0xDC00:
        return ("\ufffd" if 0xDC00 <= code < 0xE000 else chr(code)), 6
    if len(text) < place + 8 and "\\u".startswith(text[place + 6 :]):
        return "", 0  # its second half may come
    if text[place + 6 : place + 8] != "\\u":
        return "\ufffd", 6
    low = _unit(text, place + 6)
    if low is None:
        return "", 0
    if not 0xDC00 <= low < 0xE000:
        return "\ufffd", 6
    return chr(0x10000 + ((code - 0xD800) << 10) + low - 0xDC00), 12


def _unit(text: str, place: int) -> int | None:
    """Returns the number of a `\\u` escape; None while it is not whole. Digits that are none make U+FFFD."""
    digits = text[place + 2 : place + 6]
    if len(digits) < 4:
        return None
    try:
        return int(digits, 16)
    except ValueError:
        return 0xFFFD
