"""Writer of grammars in llguidance's dialect of Lark: of a JSON schema, of an expression, or of EBNF rules, whose texts
are accepted byte for byte.

llguidance splits a text into terminals first, each as long as it can be, and parses those. So one of our terminals is
either the whole text, where the rules do not refer to themselves (one expression, which is not split), or a single
character (the text is split everywhere).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import Any

from gateway.structured.charset import Ranges, in_json, one_of
from gateway.structured.rules import LARK_ROOT, Chars, Either, Node, Ref, Repeat, Rules, Sequence, refs

_DEPTH = 8
"""Largest depth of parentheses in a rule. A deeper part gets its own rule, because the library bounds the
depth."""
_SCHEMA_OPTIONS = {
    "whitespace_flexible": False,
    "item_separator": ", ?",
    "key_separator": ": ?",
    "json_allowed_escapes": 'nrbtf\\"',
}
"""There is at most one space after `,` and `:` and none elsewhere. Characters are not written by number, so that a
further name of an object cannot spell a listed one in another way."""


def of_schema(schema: dict[str, Any]) -> str:
    """Writes a grammar of the JSON texts that satisfy a schema, as the library reads it."""
    return f"start: {schema_text(schema)}\n"


def schema_text(schema: dict[str, Any]) -> str:
    """Returns the right side of a rule of the JSON texts that satisfy a schema."""
    return f"%json {json.dumps({'x-guidance': _SCHEMA_OPTIONS} | schema)}"


def of_expression(expression: str) -> str:
    """Writes a grammar of the texts that an expression without slashes matches as a whole."""
    return f"start: /{expression}/\n"


def of_rules(rules: Rules) -> str:
    """Writes the rules that `root` leads to. It needs as many stack frames as nodes are nested."""
    writer = _written(rules, "root", "", one_of)
    return "\n".join((f"start: {writer.names['root']}", *writer.lines, ""))


def of_own(rules: Rules, prefix: str) -> tuple[str, list[str]]:
    """Writes the rules that `LARK_ROOT` leads to, of texts as they stand in a string of JSON, under names that begin
    with `prefix`, which is in small letters. Returns the name of the first rule, and the rules. Raises `ValueError` for
    a character that cannot stand there.

    Each terminal is one character or its escape: longer ones would be split before it is known whether a backslash goes
    on with them or begins the next.
    """
    writer = _written(rules, LARK_ROOT, prefix, in_json)
    return writer.names[LARK_ROOT], writer.lines


def _written(rules: Rules, root: str, prefix: str, one_of: Callable[[Ranges], str]) -> _Writer:
    used = reached(rules, root)
    writer = _Writer(f"{prefix}r" if _has_cycle(rules, used) else f"{prefix.upper()}R", one_of)
    for name in used:
        writer.names[name] = writer.new_name()
    for name in used:
        writer.add(writer.names[name], rules[name])
    return writer


def reached(rules: Rules, *names: str) -> dict[str, None]:
    """Returns these names and all that they refer to, in the order in which they are found."""
    found = dict.fromkeys(names)
    waiting = list(found)
    while waiting:
        for name in refs(rules[waiting.pop()]):
            if name not in found:
                found[name] = None
                waiting.append(name)
    return found


def _has_cycle(rules: Rules, names: Iterable[str]) -> bool:
    """Returns whether one of these rules refers to itself, by others too."""
    try:
        TopologicalSorter({name: set(refs(rules[name])) for name in names}).prepare()
    except CycleError:
        return True
    return False


class _Writer:
    def __init__(self, kind: str, one_of: Callable[[Ranges], str]) -> None:
        """Creates a writer. `kind` is the beginning of names, whose case makes them rules or terminals. `one_of` writes
        one character of a set.
        """
        self.names: dict[str, str] = {}
        self.lines: list[str] = []
        self._kind, self._number, self._one_of = kind, 0, cache(one_of)

    def new_name(self) -> str:
        self._number += 1
        return f"{self._kind}{self._number}"

    def add(self, name: str, node: Node) -> None:
        self.lines.append(f"{name}: {self._body(node, 0)}")

    def _body(self, node: Node, depth: int) -> str:
        match node:
            case Chars(ranges):
                return f"/{self._one_of(ranges)}/"
            case Ref(name):
                return self.names[name]
            case Sequence(()) | Repeat(high=0):
                return '""'
        if depth == _DEPTH:
            name = self.new_name()
            self.add(name, node)
            return name
        match node:
            case Sequence(parts):
                return f"({' '.join(self._body(part, depth + 1) for part in parts)})"
            case Either(parts):
                return f"({' | '.join(self._body(part, depth + 1) for part in parts)})"
            case Repeat(part, low, high):
                times = f"{{{low},{'' if high is None else high}}}"
                return f"({self._body(part, depth + 1)}){times}"
