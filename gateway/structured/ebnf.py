"""Parser from EBNF text to rules as nodes: `name ::= body`, literals, classes, groups, `* + ? {m,n}`.

The module is pure. Characters are sets of code points; surrogates are in none of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gateway.structured import charset
from gateway.structured.charset import Ranges

MAX_DEPTH = 64
"""Largest depth of nested groups."""
_TOKEN = re.compile(
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
_REPEATS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_LAST = 0x10FFFF


class EbnfError(ValueError):
    """The text is not valid EBNF. The message is one sentence."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set. With an empty set nothing matches."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence of parts. With no parts it is the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


Node = Chars | Sequence | Either | Repeat | Ref
Rules = Mapping[str, Node]


def read(text: str) -> Rules:
    """Parses the text into rules, one of which is `root`. Raises `EbnfError`, also for a name that has no rule."""
    rules = dict(_Reader(text).rules())
    if "root" not in rules:
        raise EbnfError("there is no rule root")
    for body in rules.values():
        for name in refs(body):
            if name not in rules:
                raise EbnfError(f"there is no rule {name}")
    return rules


def refs(node: Node) -> Iterator[str]:
    match node:
        case Ref(name):
            yield name
        case Sequence(parts) | Either(parts):
            for part in parts:
                yield from refs(part)
        case Repeat(part):
            yield from refs(part)


class _Reader:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._place = 0
        self._depth = 0

    def rules(self) -> Iterator[tuple[str, Node]]:
        names: set[str] = set()
        while self._place < len(self._tokens):
            kind, name = self._next()
            if kind != "name" or self._next()[0] != "define":
                raise EbnfError("something stands outside of a rule")
            if name in names:
                raise EbnfError(f"the rule {name} is there twice")
            names.add(name)
            yield name, self._either()

    def _next(self) -> tuple[str, str]:
        if self._place == len(self._tokens):
            raise EbnfError("the text ends too early")
        self._place += 1
        return self._tokens[self._place - 1]

    def _at(self, kind: str, ahead: int = 0) -> bool:
        place = self._place + ahead
        return place < len(self._tokens) and self._tokens[place][0] == kind

    def _at_mark(self, marks: str) -> bool:
        return self._at("mark") and self._tokens[self._place][1] in marks

    def _either(self) -> Node:
        parts = [self._sequence()]
        while self._at_mark("|"):
            self._place += 1
            parts.append(self._sequence())
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _sequence(self) -> Node:
        parts = [self._repeated()]
        while self._place < len(self._tokens) and not self._at_mark("|)"):
            if self._at("name") and self._at("define", 1):
                break
            parts.append(self._repeated())
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self) -> Node:
        node = self._atom()
        if self._at_mark("*+?"):
            return Repeat(node, *_REPEATS[self._next()[1]])
        if not self._at("bounds"):
            return node
        first, comma, last = (part.strip() for part in self._next()[1].partition(","))
        low = int(first)
        high = int(last) if last else None if comma else low
        if high is not None and high < low:
            raise EbnfError(f"a repetition ends at {high}, before it begins at {low}")
        return Repeat(node, low, high)

    def _atom(self) -> Node:
        match self._next():
            case ("literal", text):
                parts = tuple(Chars(charset.common(((code, code),), charset.ALL)) for code in _codes(text))
                return parts[0] if len(parts) == 1 else Sequence(parts)
            case ("chars", text):
                return Chars(_class(text))
            case ("name", name):
                return Ref(name)
            case ("mark", "("):
                return self._group()
            case (_, found):
                raise EbnfError(f"there should be a literal, a class, a name or a group, not {found}")

    def _group(self) -> Node:
        if self._at_mark(")"):
            self._place += 1
            return Sequence(())
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise EbnfError(f"groups are nested deeper than {MAX_DEPTH}")
        body = self._either()
        if self._next() != ("mark", ")"):
            raise EbnfError("a group is not closed")
        self._depth -= 1
        return body


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            line = text.count("\n", 0, place) + 1
            raise EbnfError(f"what stands in line {line} cannot be read")
        place = match.end()
        kind = match.lastgroup
        assert kind is not None
        if kind != "space":
            yield kind, match[kind]


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
            raise EbnfError(f"the escape {match[0]} is not a character")
        return code
    if escaped in _ITSELF:
        return ord(escaped)
    if escaped not in _ESCAPES:
        raise EbnfError(f"the escape {match[0]} is not known")
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
                raise EbnfError("a range in a class ends before it begins")
        parts.append((low, high))
        place += 1
    found = charset.common(charset.union(parts), charset.ALL)
    return charset.without(charset.ALL, found) if negated else found
