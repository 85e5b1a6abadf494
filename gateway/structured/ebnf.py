"""Reader of EBNF text: `name ::= body`, literals, classes, groups, `* + ? {m,n}`. The module is pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from gateway.structured import charset
from gateway.structured.charset import Ranges
from gateway.structured.lexemes import Lexemes, split
from gateway.structured.rules import (
    REPEATS,
    Chars,
    Node,
    Ref,
    Repeat,
    Rules,
    RulesError,
    Sequence,
    either,
    endless,
    refs,
    sequence,
)

MAX_DEPTH = 64
"""Largest depth of nested groups."""
_LEXEME = re.compile(
    r"(?P<space>\s+|\#[^\n]*)"
    r"|(?P<define>::=)"
    r"|(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)"
    r'|"(?P<literal>(?:[^"\\\n]|\\.)*)"'
    r"|\[(?P<chars>(?:[^\]\\\n]|\\.)*)\]"
    r"|\{\s*(?P<bounds>\d{1,9}\s*(?:,\s*(?:\d{1,9}\s*)?)?)\}"
    r"|(?P<mark>[|()*+?])"
)
_CHAR = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))|([^\\])")
_ESCAPES = dict(zip("nrtbfv0ae", "\n\r\t\b\f\v\0\a\x1b", strict=True))
_ITSELF = "\"'\\?-[]^/"
_LAST = 0x10FFFF


def read(text: str) -> Rules:
    """Parses the text into rules, one of which is `root`. Raises `RulesError`, also for a name that has no rule
    and for a rule that has no text."""
    rules = dict(_Reader(text).rules())
    if "root" not in rules:
        raise RulesError("there is no rule root")
    for body in rules.values():
        for name in refs(body):
            if name not in rules:
                raise RulesError(f"there is no rule {name}")
    if (without_end := endless(rules)) is not None:
        raise RulesError(f"the rule {without_end} has no text that ends")
    return rules


class _Reader:
    def __init__(self, text: str) -> None:
        self._lexemes = Lexemes(list(split(text, _LEXEME)))
        self._depth = 0

    def rules(self) -> Iterator[tuple[str, Node]]:
        names: set[str] = set()
        while not self._lexemes.has_ended:
            kind, name = self._lexemes.next()
            if kind != "name" or self._lexemes.next()[0] != "define":
                raise RulesError("something stands outside of a rule")
            if name in names:
                raise RulesError(f"the rule {name} is there twice")
            names.add(name)
            yield name, self._either()

    def _either(self) -> Node:
        parts = [self._sequence()]
        while self._lexemes.skip("|"):
            parts.append(self._sequence())
        return either(parts)

    def _sequence(self) -> Node:
        parts = [self._repeated()]
        while not self._lexemes.has_ended and not self._lexemes.at("|)"):
            if self._lexemes.kind() == "name" and self._lexemes.kind(1) == "define":
                break
            parts.append(self._repeated())
        return sequence(parts)

    def _repeated(self) -> Node:
        node = self._atom()
        if self._lexemes.at("*+?"):
            return Repeat(node, *REPEATS[self._lexemes.next()[1]])
        if self._lexemes.kind() != "bounds":
            return node
        first, comma, last = (part.strip() for part in self._lexemes.next()[1].partition(","))
        low = int(first)
        high = int(last) if last else None if comma else low
        if high is not None and high < low:
            raise RulesError(f"a repetition ends at {high}, before it begins at {low}")
        return Repeat(node, low, high)

    def _atom(self) -> Node:
        match self._lexemes.next():
            case ("literal", text):
                return sequence([Chars(charset.common(((code, code),), charset.ALL)) for code in _codes(text)])
            case ("chars", text):
                return Chars(_class(text))
            case ("name", name):
                return Ref(name)
            case ("mark", "("):
                return self._group()
            case (_, other):
                raise RulesError(f"there should be a literal, a class, a name or a group, not {other}")

    def _group(self) -> Node:
        if self._lexemes.skip(")"):
            return Sequence(())
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise RulesError(f"groups are nested deeper than {MAX_DEPTH}")
        body = self._either()
        if not self._lexemes.skip(")"):
            raise RulesError("a group is not closed")
        self._depth -= 1
        return body


def _codes(text: str) -> list[int]:
    return [_code(match) for match in _chars(text)]


def _chars(text: str) -> list[re.Match[str]]:
    found = list(_CHAR.finditer(text))
    assert sum(len(match[0]) for match in found) == len(text), text
    return found


def _code(match: re.Match[str]) -> int:
    *numbers, escaped, plain = match.groups()
    if plain is not None:
        return ord(plain)
    if escaped is None:
        code = int(next(number for number in numbers if number), 16)
        if code > _LAST:
            raise RulesError(f"the escape {match[0]} is not a character")
        if 0xD800 <= code <= 0xDFFF:
            raise RulesError("a surrogate is not a character")
        return code
    if escaped in _ITSELF:
        return ord(escaped)
    if escaped not in _ESCAPES:
        raise RulesError(f"the escape {match[0]} is not known")
    return ord(_ESCAPES[escaped])


def _class(text: str) -> Ranges:
    negated = text.startswith("^")
    chars = _chars(text[negated:])
    parts: list[tuple[int, int]] = []
    place = 0
    while place < len(chars):
        low = high = _code(chars[place])
        if place + 2 < len(chars) and chars[place + 1][0] == "-":
            place, high = place + 2, _code(chars[place + 2])
            if high < low:
                raise RulesError("a range in a class ends before it begins")
        parts.append((low, high))
        place += 1
    found = charset.common(charset.union(parts), charset.ALL)
    return charset.without(charset.ALL, found) if negated else found
