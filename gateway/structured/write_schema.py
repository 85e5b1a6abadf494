"""Writes the nodes of a schema as a grammar of the JSON texts that satisfy them.

Pure. The texts have at most one space after `,` and `:` and none elsewhere; keys in the schema's order, each at most
once; numbers that 64 bits hold.
"""

from __future__ import annotations

import json
from typing import Any as Json

from gateway.structured import charset, numbers
from gateway.structured.charset import literal
from gateway.structured.nodes import (
    Any,
    Array,
    Boolean,
    Document,
    Either,
    Integer,
    Literals,
    Node,
    Null,
    Number,
    Object,
    Property,
    Ref,
    String,
)

_DIGITS = numbers.MAX_DIGITS - 1
_BASE = {
    "gap": '" "?',
    "comma": '"," gap',
    "colon": '":" gap',
    "char": charset.in_json(charset.ALL),
    "string": r'"\"" char* "\""',
    "integer": f'"-"? ("0" | [1-9] [0-9]{{0,{_DIGITS}}})',
    "number": 'integer ("." [0-9]{1,16})? ([eE] ("+" | "-")? [0-9]{1,2})?',
    "member": "string colon value",
    "object": '"{" (member (comma member)*)? "}"',
    "array": '"[" (value (comma value)*)? "]"',
    "value": 'object | array | string | number | "true" | "false" | "null"',
}


def grammar(document: Document) -> str:
    """Returns the rules, one per line; the first is `root`."""
    return _Writer(document).write()


class _Writer:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._names = {name: f"ref{i}" for i, name in enumerate(document.named)}
        self._rules: dict[str, str] = {}
        """The body of a rule → its name."""

    def write(self) -> str:
        lines = [f"root ::= {self._node(self._document.root)}"]
        for name, node in self._document.named.items():
            lines.append(f"{self._names[name]} ::= {self._node(node)}")
        lines += [f"{name} ::= {body}" for body, name in self._rules.items()]
        lines += [f"{name} ::= {body}" for name, body in _BASE.items()]
        return "\n".join(lines) + "\n"

    def _rule(self, body: str) -> str:
        return self._rules.setdefault(body, f"rule{len(self._rules)}")

    def _node(self, node: Node) -> str:
        match node:
            case Any():
                return "value"
            case Literals(values):
                return self._rule(" | ".join(map(_fixed, values)))
            case Null():
                return '"null"'
            case Boolean():
                return '("true" | "false")'
            case Number():
                return "number"
            case Integer(low, high):
                full = (low, high) == (-numbers.LIMIT, numbers.LIMIT)
                return "integer" if full else self._rule(numbers.between(low, high))
            case String(low, high, inside):
                return self._string(low, high, inside)
            case Array():
                return self._array(node)
            case Object():
                return self._object(node)
            case Either(nodes):
                return self._rule(" | ".join(map(self._node, nodes)))
            case Ref(name):
                return self._names[name]

    def _string(self, low: int, high: int | None, inside: str | None) -> str:
        if inside is not None:
            return self._rule(f'"\\"" {inside} "\\""')
        if low == 0 and high is None:
            return "string"
        return self._rule(f'"\\"" {_repeated("char", low, high)} "\\""')

    def _array(self, node: Array) -> str:
        return self._rule(f'"[" {self._items(node)} "]"')

    def _items(self, node: Array) -> str:
        """Writes the items, from the last item of the prefix to the first; each step adds what may
        follow item i - 1.
        """
        prefix, low, high = node.prefix, node.min_items, node.max_items
        size = len(prefix)
        tail = ""
        if node.rest is not None and (high is None or high > size):
            item, most = self._node(node.rest), None if high is None else high - size
            tail = _listed(item, max(0, low - size), most, begins=size == 0)
        for i in reversed(range(size if high is None else min(size, high))):
            item = " ".join(filter(None, ("comma" if i else "", self._node(prefix[i]), tail)))
            tail = self._rule(item) if i < low else f"({self._rule(item)})?"
        return tail or '""'

    def _object(self, node: Object) -> str:
        """Writes an object as two chains of rules: for the case that nothing was written yet, and for the case that
        something was.
        """
        first = next_ = ""
        if node.extra is not None:
            member = self._rule(f"{self._other_name(node.properties)} colon {self._node(node.extra)}")
            first, next_ = _listed(member, 0, None, begins=True), f"(comma {member})*"
        for one in reversed(node.properties):
            member = f"{_fixed(one.name)} colon {self._node(one.node)}"
            begun = self._rule(" ".join(filter(None, (member, next_))))
            followed = self._rule(" ".join(filter(None, ("comma", member, next_))))
            if one.required:
                first, next_ = begun, followed
            else:
                first = self._rule(f"{begun} | {first}" if first else f'{begun} | ""')
                next_ = self._rule(f"{followed} | {next_}" if next_ else f'{followed} | ""')
        return self._rule(f'"{{" {first} "}}"' if first else '"{}"')

    def _other_name(self, properties: tuple[Property, ...]) -> str:
        """Returns a string that is none of the listed names. It has no escapes, so that it cannot spell a listed name
        with them.
        """
        if not properties:
            return "string"
        return self._rule(f'"\\"" {self._unlike([one.name for one in properties])}')

    def _unlike(self, names: list[str]) -> str:
        """Returns the rest of a string, its closing quote included, that is none of `names`."""
        by_first: dict[str, list[str]] = {}
        for name in names:
            if name:
                by_first.setdefault(name[0], []).append(name[1:])
        others = charset.without(charset.IN_STRING, charset.chars("".join(by_first)))
        anything = self._rule(f'{charset.raw(charset.IN_STRING)}* "\\""')
        parts = [f"{charset.raw(others)} {anything}"]
        if "" not in names:
            parts.append('"\\""')
        for char, rest in by_first.items():
            if charset.common(charset.chars(char), charset.IN_STRING):
                parts.append(f"{charset.raw(charset.chars(char))} {self._unlike(rest)}")
        return self._rule(" | ".join(parts))


def _fixed(value: Json) -> str:
    return literal(json.dumps(value, ensure_ascii=False))


def _repeated(item: str, low: int, high: int | None) -> str:
    if high == 0:
        return '""'
    return f"{item}{{{low},{'' if high is None else high}}}"


def _listed(item: str, low: int, high: int | None, *, begins: bool) -> str:
    """Returns `low` .. `high` items with a comma before each; if the list begins here, the first item has none."""
    if high == 0:
        return ""
    if not begins:
        return _repeated(f"(comma {item})", low, high)
    more = _repeated(f"(comma {item})", max(0, low - 1), None if high is None else high - 1)
    several = item if high == 1 else f"{item} {more}"
    return several if low else f"({several})?"
