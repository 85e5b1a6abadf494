"""Reads a JSON schema that a client sent as nodes. A schema that could not be enforced is refused, with the place.

Pure. Every keyword of a node is either enforced, an annotation, or a refusal; none is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any as Json
from typing import ClassVar
from urllib.parse import unquote

from gateway.structured import regex
from gateway.structured.formats import ANNOTATIONS as NUMBER_FORMATS
from gateway.structured.formats import FORMATS
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
from gateway.structured.numbers import LIMIT
from gateway.structured.soundness import excluding, termless

MAX_DEPTH = 16
MAX_PROPERTIES = 512
MAX_NAMED = 256
"""The most places that `$ref` leads to."""
MAX_NAME = 256
"""The most characters of a property's name."""
MAX_COUNT = 10_000
"""The largest bound on length or items."""

_ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "default",
        "examples",
        "$schema",
        "$id",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$defs",
        "definitions",
    }
)
_KEYWORDS = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "format"),
    "number": ("format",),
    "boolean": (),
    "null": (),
}
_TYPE_OF = {name: kind for kind in ("number", "integer", "string", "array", "object") for name in _KEYWORDS[kind]}
_ALONE = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
"""Keywords that define a node alone. Without one of them the type defines the node."""


class SchemaError(ValueError):
    """A schema that cannot be enforced. `pointer` is the place, as a JSON pointer."""

    def __init__(self, pointer: str, message: str) -> None:
        super().__init__(message)
        self.pointer = pointer


def read(schema: Json) -> Document:
    """Reads a schema. Raises `SchemaError`."""
    return _Reader(schema).read()


class _Reader:
    def __init__(self, schema: Json) -> None:
        self._schema = schema
        self._document = Document()
        self._num_properties = 0
        self._unread: list[str] = []
        self._exclusive: list[tuple[str, list[Node]]] = []

    def read(self) -> Document:
        document = self._document
        document.root = self._node(self._schema, "", 1)
        while self._unread:
            name = self._unread.pop()
            document.named[name] = self._node(self._find(name), name, 1)
        if (circle := termless(document)) is not None:
            raise SchemaError(circle, "This schema refers to itself without an end.")
        for pointer, nodes in self._exclusive:
            if not excluding(document, nodes):
                raise SchemaError(pointer, "The branches of 'oneOf' must exclude each other; use 'anyOf'.")
        return document

    def _node(self, schema: Json, at: str, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise SchemaError(at, f"The schema is deeper than {MAX_DEPTH}.")
        if schema is True:
            return Any()
        if not isinstance(schema, dict):
            raise SchemaError(at, "A schema must be an object.")
        alone = [name for name in _ALONE if name in schema]
        if not alone:
            return self._typed(schema, at, depth)
        if len(alone) > 1:
            raise _refused(at, alone[1], f"It cannot be combined with '{alone[0]}'.")
        literal = alone[0] in ("enum", "const")
        self._refuse_others(schema, {alone[0], "type"} if literal else {alone[0]}, at)
        return self._by_name[alone[0]](self, schema, at, depth)

    def _refuse_others(self, schema: dict[str, Json], known: set[str], at: str) -> None:
        for name in schema:
            if name not in known and name not in _ANNOTATIONS:
                raise _refused(at, name)

    # --- nodes defined by one keyword ---

    def _ref(self, schema: dict[str, Json], at: str, depth: int) -> Node:
        place = schema["$ref"]
        if not isinstance(place, str) or not (place == "#" or place.startswith("#/")):
            raise _refused(at, "$ref", "Only references inside the schema are.")
        name = unquote(place[1:])
        if name not in self._document.named:
            if self._find(name) is None:
                raise SchemaError(f"{at}/$ref", "The reference leads nowhere.")
            if len(self._document.named) == MAX_NAMED:
                raise SchemaError(f"{at}/$ref", f"References to more than {MAX_NAMED} places.")
            self._document.named[name] = Any()  # a placeholder until the schema is read: it may refer to itself
            self._unread.append(name)
        return Ref(name)

    def _find(self, pointer: str) -> Json:
        """Returns the part of the schema at a pointer, or None if there is none."""
        found = self._schema
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and part.isascii() and part.isdigit():
                found = dict(enumerate(found)).get(int(part[:6]))
            else:
                found = found.get(part) if isinstance(found, dict) else None
        return found

    def _literals(self, schema: dict[str, Json], at: str, depth: int) -> Node:
        name = "const" if "const" in schema else "enum"
        values = [schema["const"]] if name == "const" else schema["enum"]
        if not isinstance(values, list) or not values:
            raise SchemaError(f"{at}/enum", "'enum' must be a list that is not empty.")
        types = self._types(schema, at) or tuple(_KEYWORDS)
        fitting = tuple(value for value in values if any(_is_a(value, kind) for kind in types))
        if not fitting:
            raise SchemaError(f"{at}/{name}", "No value has the type.")
        return Literals(fitting)

    def _either(self, schema: dict[str, Json], at: str, depth: int) -> Node:
        name = next(name for name in ("anyOf", "oneOf", "allOf") if name in schema)
        branches = schema[name]
        if not isinstance(branches, list) or not branches:
            raise SchemaError(f"{at}/{name}", f"'{name}' must be a list that is not empty.")
        if name == "allOf" and len(branches) > 1:
            raise _refused(at, name, "Only one branch is.")
        nodes = [self._node(branch, f"{at}/{name}/{i}", depth + 1) for i, branch in enumerate(branches)]
        if name == "oneOf":
            self._exclusive.append((f"{at}/{name}", nodes))
        return nodes[0] if len(nodes) == 1 else Either(tuple(nodes))

    # --- nodes defined by a type ---

    def _types(self, schema: dict[str, Json], at: str) -> tuple[str, ...]:
        given = schema.get("type", [])
        types = [given] if isinstance(given, str) else given
        known = isinstance(types, list) and all(isinstance(kind, str) and kind in _KEYWORDS for kind in types)
        if not known or ("type" in schema and not types):
            raise SchemaError(f"{at}/type", "This type does not exist.")
        return tuple(dict.fromkeys(types))

    def _typed(self, schema: dict[str, Json], at: str, depth: int) -> Node:
        types = self._types(schema, at)
        keywords = [name for name in schema if name != "type" and name not in _ANNOTATIONS]
        if not types:
            if not keywords:
                return Any()
            if keywords[0] not in _TYPE_OF:
                raise _refused(at, keywords[0])
            types = (_TYPE_OF[keywords[0]],)
        for name in keywords:
            if not any(name in _KEYWORDS[kind] for kind in types):
                raise _refused(at, name)
            if name != "format" and "number" in types and name in _KEYWORDS["integer"]:
                raise _refused(at, name, "Bounds are for integers only.")
        nodes = tuple(self._of_type[kind](self, schema, at, depth) for kind in types)
        return nodes[0] if len(nodes) == 1 else Either(nodes)

    def _null(self, schema: dict[str, Json], at: str, depth: int) -> Node:
        return Null()

    def _boolean(self, schema: dict[str, Json], at: str, depth: int) -> Node:
        return Boolean()

    def _number(self, schema: dict[str, Json], at: str, depth: int) -> Node:
        self._number_format(schema, at)
        return Number()

    def _integer(self, schema: dict[str, Json], at: str, depth: int) -> Node:
        self._number_format(schema, at)
        low, high = -LIMIT, LIMIT
        for name, is_low, is_open in (
            ("minimum", True, False),
            ("exclusiveMinimum", True, True),
            ("maximum", False, False),
            ("exclusiveMaximum", False, True),
        ):
            if name not in schema:
                continue
            bound = schema[name]
            if not _is_a(bound, "number"):
                raise SchemaError(f"{at}/{name}", "A bound must be a number.")
            if is_low:
                low = max(low, math.floor(bound) + 1 if is_open else math.ceil(bound))
            else:
                high = min(high, math.ceil(bound) - 1 if is_open else math.floor(bound))
        if low > high:
            raise SchemaError(at, "No integer is within the bounds.")
        return Integer(low, high)

    def _number_format(self, schema: dict[str, Json], at: str) -> None:
        types = self._types(schema, at)
        name = schema.get("format")
        if name is not None and name not in NUMBER_FORMATS and "string" not in types:
            raise _refused(at, "format")

    def _string(self, schema: dict[str, Json], at: str, depth: int) -> Node:
        low, high = self._bounds(schema, "minLength", "maxLength", at)
        given = [name for name in ("pattern", "format") if name in schema]
        if not given:
            return String(low, high)
        if len(given) > 1 or "minLength" in schema or "maxLength" in schema:
            raise _refused(at, given[0], "It cannot be combined with other bounds of a string.")
        text = schema[given[0]]
        if not isinstance(text, str):
            raise SchemaError(f"{at}/{given[0]}", "It must be a string.")
        if given[0] == "format":
            if text not in FORMATS:
                raise _refused(at, "format")
            text = f"^(?:{FORMATS[text]})$"
        try:
            return String(inside=regex.inside_json(text))
        except regex.RegexError as error:
            raise SchemaError(f"{at}/pattern", str(error)) from None

    def _array(self, schema: dict[str, Json], at: str, depth: int) -> Node:
        low, high = self._bounds(schema, "minItems", "maxItems", at)
        given = schema.get("prefixItems", [])
        if not isinstance(given, list):
            raise SchemaError(f"{at}/prefixItems", "'prefixItems' must be a list.")
        prefix = tuple(self._node(one, f"{at}/prefixItems/{i}", depth + 1) for i, one in enumerate(given))
        items = schema.get("items", True)
        rest = None if items is False else self._node(items, f"{at}/items", depth + 1)
        if rest is None and low > len(prefix):
            raise SchemaError(f"{at}/minItems", "There are fewer items.")
        return Array(prefix, rest, low, high)

    def _object(self, schema: dict[str, Json], at: str, depth: int) -> Node:
        given = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(given, dict):
            raise SchemaError(f"{at}/properties", "'properties' must be an object.")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{at}/required", "'required' must be a list of names.")
        if missing := [name for name in required if name not in given]:
            place = required.index(missing[0])
            raise SchemaError(f"{at}/required/{place}", "A required property is not described.")
        if any(len(name) > MAX_NAME for name in given):
            raise SchemaError(f"{at}/properties", f"A name is longer than {MAX_NAME}.")
        self._num_properties += len(given)
        if self._num_properties > MAX_PROPERTIES:
            raise SchemaError(f"{at}/properties", f"More than {MAX_PROPERTIES} properties.")
        properties = tuple(
            Property(name, self._node(one, f"{at}/properties/{_escaped(name)}", depth + 1), name in required)
            for name, one in given.items()
        )
        extra = schema.get("additionalProperties", "properties" not in schema)
        if extra is False:
            return Object(properties, None)
        return Object(properties, self._node(extra, f"{at}/additionalProperties", depth + 1))

    def _bounds(self, schema: dict[str, Json], lowest: str, highest: str, at: str) -> tuple[int, int | None]:
        for name in (lowest, highest):
            value = schema.get(name, 0)
            if type(value) is not int or not 0 <= value <= MAX_COUNT:
                raise SchemaError(f"{at}/{name}", f"It must be an integer from 0 to {MAX_COUNT}.")
        low, high = schema.get(lowest, 0), schema.get(highest)
        if high is not None and low > high:
            raise SchemaError(f"{at}/{lowest}", f"It is above '{highest}'.")
        return low, high

    _by_name: ClassVar[dict[str, Callable[[_Reader, dict[str, Json], str, int], Node]]] = {
        "$ref": _ref,
        "enum": _literals,
        "const": _literals,
        "anyOf": _either,
        "oneOf": _either,
        "allOf": _either,
    }
    _of_type: ClassVar[dict[str, Callable[[_Reader, dict[str, Json], str, int], Node]]] = {
        "null": _null,
        "boolean": _boolean,
        "number": _number,
        "integer": _integer,
        "string": _string,
        "array": _array,
        "object": _object,
    }


def _refused(at: str, name: str, hint: str = "") -> SchemaError:
    return SchemaError(f"{at}/{_escaped(name)}", f"This keyword is not supported here. {hint}")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _is_a(value: Json, kind: str) -> bool:
    match kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case _:
            return isinstance(value, dict)
