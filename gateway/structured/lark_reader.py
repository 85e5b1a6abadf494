"""Reader of a client's own grammar in Lark's syntax: what it says becomes rules of expressions.

The subset is what decides which texts there are: rules, terminals, strings, expressions, ranges, groups, repetitions,
`%ignore`, and `%import` of `common`. What only shapes a tree is read and means nothing: aliases, priorities, and the
marks `?`, `!` and `_`. Templates, other directives, and expressions that are no regular ones are refused. The module is
pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gateway.structured import charset, terminal
from gateway.structured.lexemes import Lexeme, Lexemes, split
from gateway.structured.regex import RegexError
from gateway.structured.rules import (
    LARK_ROOT,
    REPEATS,
    Chars,
    Either,
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

MAX_DEPTH = 32
"""Largest depth of nested groups."""
MAX_REPEAT = 1_000
MAX_NAMES = 500
"""The most rules and terminals."""
_LEXEME = re.compile(
    r"(?P<space>(?:[ \t\f\r]|//[^\n]*|\#[^\n]*)+)"
    r"|(?P<line>\n)"
    r"|(?P<directive>%[a-z]+)"
    r"|(?P<arrow>->)"
    r"|(?P<string>\"(?:[^\"\\\n]|\\[^\n])*\"i?)"
    r"|(?P<regex>/(?!/)(?:[^/\\\n]|\\[^\n])+/[imslux]*)"
    r"|(?P<range>\.\.)"
    r"|(?P<name>_*[A-Za-z][A-Za-z0-9_]*)"
    r"|(?P<number>-?\d{1,9})"
    r"|(?P<mark>[|()\[\]*+?~:.,!])"
)

_IGNORED = "%ignore"


@dataclass(frozen=True)
class _Leaf:
    """A terminal without a name, in a body."""

    node: Node


@dataclass(frozen=True)
class _Grammar:
    """Rules and terminals by name, one of which is `start`. Terminals have names in capitals and refer to terminals."""

    bodies: dict[str, Any]
    """Bodies are nodes in which a terminal without a name is a `_Leaf`."""
    ignored: tuple[Any, ...] = ()
    """Texts that may stand in front of each terminal of a rule, and at the end."""


@dataclass
class _Reader:
    lexemes: Lexemes
    depth: int = 0
    bodies: dict[str, Any] = field(default_factory=dict)
    ignored: list[Any] = field(default_factory=list)

    def read(self) -> _Grammar:
        while not self.lexemes.has_ended:
            kind, text = self.lexemes.next()
            while text in ("?", "!"):
                kind, text = self.lexemes.next()
            if kind == "directive":
                self._directive(text)
            elif kind == "name":
                self._definition(text)
            elif kind != "line":
                raise RulesError(f"a rule should begin where {text[:40]} stands")
        return _Grammar(self.bodies, tuple(self.ignored))

    # Statements

    def _definition(self, name: str) -> None:
        if self.lexemes.skip("."):
            self.lexemes.expect("number")
        if not self.lexemes.skip(":"):
            raise RulesError(f"a colon should follow the name {name}; templates are not supported")
        if name in self.bodies:
            raise RulesError(f"{name} is defined twice")
        if name not in (name.upper(), name.lower()):
            raise RulesError(f"the name {name} is neither that of a rule nor, in capitals, that of a terminal")
        self.bodies[name] = self._either()
        self._end()

    def _directive(self, text: str) -> None:
        if text == "%ignore":
            self.ignored.append(self._either())
        elif text == "%import":
            self._import()
        else:
            raise RulesError(f"the directive {text} is not supported")
        self._end()

    def _import(self) -> None:
        if self.lexemes.expect("name") != "common":
            raise RulesError("only terminals of the module common can be imported")
        if self.lexemes.skip("."):
            name = self.lexemes.expect("name")
            self._take_common(self.lexemes.expect("name") if self.lexemes.skip_kind("arrow") else name, name)
            return
        if not self.lexemes.skip("("):
            raise RulesError("the names of an import are missing")
        while not self.lexemes.skip(")"):
            name = self.lexemes.expect("name")
            self._take_common(name, name)
            self.lexemes.skip(",")

    def _take_common(self, name: str, common: str) -> None:
        if common not in terminal.COMMON:
            raise RulesError(f"the module common has no terminal {common} that is supported")
        if name in self.bodies:
            raise RulesError(f"{name} is defined twice")
        self.bodies[name] = self._expression(terminal.COMMON[common], "")

    # Bodies

    def _either(self) -> Any:
        parts = [self._sequence()]
        while self.lexemes.skip("|"):
            parts.append(self._sequence())
        return either(parts)

    def _sequence(self) -> Any:
        parts: list[Any] = []
        while (
            not self.lexemes.has_ended and not self.lexemes.at("|)]") and self.lexemes.kind() not in ("line", "arrow")
        ):
            parts.append(self._repeated())
        if self.lexemes.skip_kind("arrow"):
            self.lexemes.expect("name")
        return sequence(parts)

    def _repeated(self) -> Any:
        node = self._atom()
        if self.lexemes.at("*+?"):
            return Repeat(node, *REPEATS[self.lexemes.next()[1]])
        if not self.lexemes.skip("~"):
            return node
        low = high = int(self.lexemes.expect("number"))
        if self.lexemes.skip_kind("range"):
            high = int(self.lexemes.expect("number"))
        if not 0 <= low <= high <= MAX_REPEAT:
            raise RulesError(f"a repetition must be of 0 to {MAX_REPEAT} times, and end after its begin")
        return Repeat(node, low, high)

    def _atom(self) -> Any:
        kind, text = self.lexemes.next()
        match kind:
            case "string":
                if self.lexemes.skip_kind("range"):
                    return self._range(text, self.lexemes.expect("string"))
                return _Leaf(terminal.literal(_unquoted(text), any_case=text.endswith("i")))
            case "regex":
                body, _, flags = text[1:].rpartition("/")
                return self._expression(body.replace("\\/", "/"), flags)
            case "name":
                return Ref(text)
            case "mark" if text in "([":
                return self._group(text)
        raise RulesError(f"a string, an expression, a name or a group should stand where {text[:40]} stands")

    def _group(self, opening: str) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise RulesError(f"groups are nested deeper than {MAX_DEPTH}")
        body = self._either()
        if not self.lexemes.skip(")" if opening == "(" else "]"):
            raise RulesError("a group is not closed")
        self.depth -= 1
        return body if opening == "(" else Repeat(body, 0, 1)

    # Texts

    def _range(self, first: str, last: str) -> Any:
        low, high = _unquoted(first), _unquoted(last)
        if len(low) != 1 or len(high) != 1 or low > high:
            raise RulesError("a range goes from one character to a later one")
        return _Leaf(Chars(charset.common(((ord(low), ord(high)),), charset.ALL)))

    def _expression(self, body: str, flags: str) -> Any:
        if set(flags) - set("isu"):
            raise RulesError("expressions may have the flags i, s and u")
        try:
            return _Leaf(terminal.read(body, any_case="i" in flags, dot_all="s" in flags))
        except RegexError as error:
            raise RulesError(f"an expression is not supported: {str(error).rstrip('.')}") from None

    def _end(self) -> None:
        if not self.lexemes.has_ended and not self.lexemes.skip_kind("line"):
            raise RulesError(f"a line should end where {self.lexemes.next()[1][:40]} stands")


def read(text: str) -> Rules:
    """Reads a grammar into rules of characters, one of which is `LARK_ROOT`. Raises `RulesError`."""
    grammar = _Reader(Lexemes(_joined(split(text, _LEXEME)))).read()
    if len(grammar.bodies) > MAX_NAMES:
        raise RulesError(f"there are more than {MAX_NAMES} rules and terminals")
    if "start" not in grammar.bodies:
        raise RulesError("there is no rule start")
    for name, body in [*grammar.bodies.items(), *(("IGNORED", one) for one in grammar.ignored)]:
        for other in _refs(body):
            if other not in grammar.bodies:
                raise RulesError(f"there is no rule or terminal {other}")
            if is_terminal(name) and not is_terminal(other):
                raise RulesError(f"the terminal {name} refers to the rule {other}")
    _check_terminals(grammar)
    rules = _rules(grammar)
    if (without_end := endless(rules)) is not None:
        raise RulesError(f"the rule {without_end} has no text that ends")
    return rules


def _rules(grammar: _Grammar) -> Rules:
    """Returns the rules with what is ignored in its places."""
    gap: Node = Ref(_IGNORED) if grammar.ignored else Sequence(())
    found = {name: _placed(body, None if is_terminal(name) else gap) for name, body in grammar.bodies.items()}
    found[_IGNORED] = Repeat(Either(tuple(_once(_placed(one, None), found) for one in grammar.ignored)), 0, None)
    found[LARK_ROOT] = Sequence((Ref("start"), gap))
    return found


def _once(node: Node, rules: Rules) -> Node:
    """Returns what a text that is repeated consists of: a repetition of repetitions would be read in as many ways as it
    has parts.
    """
    while isinstance(node, Ref):
        node = rules[node.name]
    return _once(node.part, rules) if isinstance(node, Repeat) and node.low == 1 and node.high is None else node


def _placed(node: Any, gap: Node | None) -> Node:
    """Returns a body as nodes alone. In a rule a `gap` stands in front of each terminal."""
    match node:
        case Sequence(parts):
            return Sequence(tuple(_placed(part, gap) for part in parts))
        case Either(parts):
            return Either(tuple(_placed(part, gap) for part in parts))
        case Repeat(part, low, high):
            return Repeat(_placed(part, gap), low, high)
        case _Leaf(inner):
            return inner if gap is None else Sequence((gap, inner))
        case Ref(name) if gap is not None and is_terminal(name):
            return Sequence((gap, node))
    found: Node = node
    return found


def is_terminal(name: str) -> bool:
    return name.isupper()


def _joined(lexemes: Iterable[Lexeme]) -> list[Lexeme]:
    """Returns the lexemes without the ends of lines that go on with `|` in a later line."""
    found: list[Lexeme] = []
    for kind, text in reversed(list(lexemes)):
        if kind == "line" and found and found[-1] in (("mark", "|"), ("line", "\n")):
            continue
        found.append((kind, text))
    return found[::-1]


def _refs(body: Any) -> Iterator[str]:
    return refs(_placed(body, None))


def _check_terminals(grammar: _Grammar) -> None:
    """Refuses terminals that refer to themselves, and those that may be empty: no lexer can split a text by them."""
    depths: dict[str, int] = {}

    def depth(name: str, before: tuple[str, ...]) -> int:
        if name in before:
            raise RulesError(f"the terminal {name} refers to itself")
        if name not in depths:
            inner = (depth(other, (*before, name)) for other in set(_refs(grammar.bodies[name])))
            depths[name] = 1 + max(inner, default=0)
        if depths[name] > MAX_DEPTH:
            raise RulesError(f"terminals refer to each other deeper than {MAX_DEPTH}")
        return depths[name]

    for name in filter(is_terminal, grammar.bodies):
        depth(name, ())
    for name in filter(is_terminal, grammar.bodies):
        if _may_be_empty(grammar, grammar.bodies[name]):
            raise RulesError(f"the terminal {name} matches the empty text")
    if any(_may_be_empty(grammar, one) for one in grammar.ignored):
        raise RulesError("what is ignored matches the empty text")


def _may_be_empty(grammar: _Grammar, node: Any) -> bool:
    match node:
        case _Leaf(inner):
            return _may_be_empty(grammar, inner)
        case Sequence(parts):
            return all(_may_be_empty(grammar, part) for part in parts)
        case Either(parts):
            return any(_may_be_empty(grammar, part) for part in parts)
        case Repeat(part, low):
            return low == 0 or _may_be_empty(grammar, part)
    return False  # a reference leads to another terminal, which is looked at itself


def _unquoted(text: str) -> str:
    """Returns the text that a string stands for; its escapes are Python's."""
    body = text.removesuffix("i")[1:-1]
    try:
        found: str = json.loads(f'"{re.sub(_ESCAPE, _as_json, body)}"', strict=False)
    except ValueError:
        raise RulesError(f"the string {text[:40]} has an escape that is not supported") from None
    if any(0xD800 <= ord(char) <= 0xDFFF for char in found):
        raise RulesError("a surrogate is not a character")
    return found


_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|.)")


def _as_json(match: re.Match[str]) -> str:
    escape = match[1]
    if escape[0] == "x" and len(escape) == 3:
        return f"\\u00{escape[1:]}"
    if escape in ("x", "U"):
        raise ValueError
    return match[0] if escape in 'nrtfu"\\' else f"\\{match[0]}"  # any other backslash is one
