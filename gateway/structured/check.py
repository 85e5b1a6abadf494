"""Checks whether a finished text has the promised form. The module is pure.

This is a second opinion, not the enforcement: it reads values, where the grammar reads characters. Only the grammar
enforces patterns and formats, because matching a client's expression may never end. Numbers are compared as decimals,
as they are written.
"""

from __future__ import annotations

import json
from decimal import Context, Decimal, DecimalException
from typing import Any as Json

from gateway.structured.document import Document, Node, types

MAX_CHARS, MAX_LOOKS = 20_000, 2_000
"""The longest text that is checked, and how often a value is held against a part of the schema. The check runs on the
gateway's loop, so it may take some milliseconds; what it does not come to is as the grammar made it."""
_MAX_DIGITS = 4000
"""The most digits of an integer that Python reads quickly."""
_EXACT = Context(prec=400)


def is_valid(document: Document, text: str) -> bool:
    """Returns whether the text is JSON that satisfies the schema, as far as `MAX_CHARS` and `MAX_LOOKS` go."""
    if len(text) > MAX_CHARS:
        return True
    try:
        value = json.loads(text, parse_int=_number, parse_float=_number, parse_constant=_refuse)
        return _Check(document).accepts(document.root, value)
    except (_TooMuch, RecursionError):
        return True
    except ValueError:
        return False


class _TooMuch(Exception):
    """The check would take too long."""


class _Check:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._known: dict[tuple[int, int], bool] = {}
        """Map from the identities of a node and a value to the result. Without it, branches that share a deep value
        would look at it again and again."""
        self._num_looks = 0

    def accepts(self, node: Node, value: Json) -> bool:
        if node is True:
            return True
        key = id(node), id(value)
        if key not in self._known:
            self._known[key] = self._look(node, value)
        return self._known[key]

    def _look(self, node: dict[str, Json], value: Json) -> bool:
        self._num_looks += 1
        if self._num_looks > MAX_LOOKS:
            raise _TooMuch
        if "$ref" in node:
            return self.accepts(self._document.target(node), value)
        if "enum" in node:
            self._num_looks += len(node["enum"])
            return any(_same(one, value) for one in node["enum"])
        if "anyOf" in node:
            return any(self.accepts(one, value) for one in node["anyOf"])
        if "allOf" in node:
            return all(self.accepts(one, value) for one in node["allOf"])
        return _has_type(types(node), value) and self._keywords(node, value)

    def _keywords(self, node: dict[str, Json], value: Json) -> bool:
        match value:
            case bool() | None:
                return True
            case int() | Decimal() | float():
                return _number_fits(node, value)
            case str():
                return _size_fits(node, len(value), "minLength", "maxLength")
            case list():
                return _size_fits(node, len(value), "minItems", "maxItems") and self._items(node, value)
            case _:
                return self._members(node, value)

    def _items(self, node: dict[str, Json], value: list[Json]) -> bool:
        prefix, rest = node.get("prefixItems", []), node.get("items", True)
        return all(self.accepts(one, item) for one, item in zip(prefix, value, strict=False)) and all(
            rest is not False and self.accepts(rest, item) for item in value[len(prefix) :]
        )

    def _members(self, node: dict[str, Json], value: dict[str, Json]) -> bool:
        known, rest = node.get("properties", {}), node.get("additionalProperties", True)
        if any(name not in value for name in node.get("required", ())):
            return False
        inner = {name: known.get(name, rest) for name in value}
        return all(part is not False and self.accepts(part, value[name]) for name, part in inner.items())


def _number(text: str) -> int | Decimal | float:
    """Reads a number exactly. A number beyond what decimals hold is infinite."""
    if len(text) <= _MAX_DIGITS and text.removeprefix("-").isdigit():
        return int(text)
    try:
        return Decimal(text)
    except DecimalException:
        return float(text)


def _refuse(text: str) -> Json:
    raise ValueError(f"{text} is not JSON")


def _has_type(names: tuple[str, ...], value: Json) -> bool:
    match value:
        case None:
            return "null" in names
        case bool():
            return "boolean" in names
        case int():
            return "integer" in names or "number" in names
        case Decimal() | float():
            return "number" in names
        case str():
            return "string" in names
        case list():
            return "array" in names
        case _:
            return "object" in names


def _number_fits(node: dict[str, Json], value: int | Decimal | float) -> bool:
    return (
        ("minimum" not in node or value >= _decimal(node["minimum"]))
        and ("maximum" not in node or value <= _decimal(node["maximum"]))
        and ("exclusiveMinimum" not in node or value > _decimal(node["exclusiveMinimum"]))
        and ("exclusiveMaximum" not in node or value < _decimal(node["exclusiveMaximum"]))
        and ("multipleOf" not in node or _is_multiple(value, _decimal(node["multipleOf"])))
    )


def _is_multiple(value: int | Decimal | float, step: Decimal) -> bool:
    try:
        return not _EXACT.remainder(Decimal(value), step)
    except DecimalException:
        return False


def _decimal(number: float) -> Decimal:
    """Returns a number of a schema as it was written, and not what a float makes of it."""
    return Decimal(str(number))


def _size_fits(node: dict[str, Json], size: int, lowest: str, highest: str) -> bool:
    low: int = node.get(lowest, 0)
    high: int = node.get(highest, size)
    return low <= size <= high


def _same(one: Json, value: Json) -> bool:
    """Compares a value of a schema with one of a text. Python takes True for 1, and JSON does not."""
    match one:
        case bool() | None | str():
            return one is value if not isinstance(one, str) else one == value
        case int() | float():
            return isinstance(value, int | Decimal) and not isinstance(value, bool) and value == _decimal(one)
        case list():
            return (
                isinstance(value, list)
                and len(one) == len(value)
                and all(_same(*pair) for pair in zip(one, value, strict=True))
            )
        case _:
            return isinstance(value, dict) and one.keys() == value.keys() and all(_same(one[k], value[k]) for k in one)
