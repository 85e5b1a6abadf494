"""Reads a JSON schema that a client sent as nodes. A schema that could not be enforced is refused, with the place.

The module is pure. Every keyword of a schema is either enforced, an annotation, or a refusal; none is dropped. The
grammar library translates the nodes, so only keywords that it enforces are in them, with values that it reads exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any as Json
from typing import ClassVar
from urllib.parse import unquote

import msgspec

from gateway.structured import numbers, regex
from gateway.structured.document import DEFINITIONS, Document, Node, SchemaError
from gateway.structured.formats import ANNOTATIONS as NUMBER_FORMATS
from gateway.structured.formats import FORMATS
from gateway.structured.soundness import MAX_COMPARISONS, excluding, termless

MAX_DEPTH = 16
MAX_PROPERTIES = 512
MAX_NAMED = 256
"""The most places that `$ref` leads to."""
MAX_READ = 256 * 1024
"""The most bytes of all these places: one may lie within another, and is read once more then."""
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
    "integer": (*numbers.KEYWORDS, "format"),
    "number": (*numbers.KEYWORDS, "format"),
    "boolean": (),
    "null": (),
}
_TYPE_OF = {name: kind for kind in ("number", "string", "array", "object") for name in _KEYWORDS[kind]}
_SHORT_ESCAPES = frozenset("\b\f\n\r\t")


def read(schema: Json) -> Document:
    """Reads a schema. Raises `SchemaError`."""
    return _Reader(schema).read()


class _Reader:
    def __init__(self, schema: Json) -> None:
        self._schema = schema
        self._document = Document()
        self._num_properties = 0
        self._num_read = 0
        """The bytes of all places that `$ref` leads to."""
        self._places: dict[tuple[str, bool], str] = {}
        """The name of a place that `$ref` leads to, and of the same place as a part of another schema."""
        self._unread: list[tuple[str, bool]] = []
        self._exclusive: list[tuple[str, list[Node]]] = []
        self._steps: list[float] = []
        self._ranges: list[dict[str, Json]] = []
        """The bounds of all numbers."""
        self._merges = False
        """Whether a value has to satisfy two schemas at once somewhere."""

    def read(self) -> Document:
        document = self._document
        document.root = self._node(self._schema, "", 1)
        while self._unread:
            place = self._unread.pop()
            document.named[self._places[place]] = self._node(self._find(place[0]), place[0], 1, is_part=place[1])
        if (circle := termless(document)) is not None:
            pointers = {name: place[0] for place, name in self._places.items()}
            raise SchemaError(pointers.get(circle, ""), "This schema refers to itself without an end.")
        left = [MAX_COMPARISONS]
        for pointer, nodes in self._exclusive:
            if not excluding(document, nodes, left):
                raise SchemaError(pointer, "The branches of 'oneOf' must exclude each other; use 'anyOf'.")
        if self._merges and not numbers.have_common_multiple(self._steps):
            raise SchemaError("", "The values of 'multipleOf' have no common multiple that is small enough.")
        if self._merges and numbers.leaking(self._ranges) is not None:
            raise SchemaError("", numbers.LEAKS)
        return document

    def _node(self, schema: Json, at: str, depth: int, *, is_part: bool = False) -> Node:
        """Reads one schema. A part shares its value with other schemas, so its objects are open unless it says
        otherwise.
        """
        if depth > MAX_DEPTH:
            raise SchemaError(at, f"The schema is deeper than {MAX_DEPTH}.")
        if schema is True:
            return True
        if not isinstance(schema, dict):
            raise SchemaError(at, "A schema must be an object.")
        types = self._types(schema, at)
        keywords = [name for name in schema if name != "type" and name not in _ANNOTATIONS]
        alone = [name for name in keywords if name in self._by_name]
        typed = [name for name in keywords if name not in alone]
        if not types and typed:
            if typed[0] not in _TYPE_OF:
                raise _refused(at, typed[0])
            types = (_TYPE_OF[typed[0]],)
        for name in typed:
            if not any(name in _KEYWORDS[kind] for kind in types):
                raise _refused(at, name)
        is_part = is_part or len(alone) + bool(typed) > 1
        if set(alone) <= {"enum", "const"} and len(alone) == 1 and not typed:
            return self._literals(schema, alone[0], at, types)
        parts: list[Node] = []
        if types:
            parts.append(self._typed(schema, types, at, depth, is_part))
        parts += [self._by_name[name](self, schema, name, at, depth, is_part) for name in alone]
        return self._all(parts)

    def _all(self, parts: list[Node]) -> Node:
        self._merges |= len(parts) > 1
        return {"allOf": parts} if len(parts) > 1 else parts[0] if parts else True

    # --- nodes defined by one keyword ---

    def _ref(self, schema: dict[str, Json], name: str, at: str, depth: int, is_part: bool) -> Node:
        given = schema["$ref"]
        if not isinstance(given, str) or not (given == "#" or given.startswith("#/")):
            raise _refused(at, "$ref", "Only references inside the schema are supported.")
        place = unquote(given[1:]), is_part
        if place not in self._places:
            found = self._find(place[0])
            if found is None:
                raise SchemaError(f"{at}/$ref", "The reference leads nowhere.")
            if len(self._places) == MAX_NAMED:
                raise SchemaError(f"{at}/$ref", f"At most {MAX_NAMED} places can be referenced.")
            self._num_read += len(msgspec.json.encode(found))
            if self._num_read > MAX_READ:
                raise SchemaError(
                    f"{at}/$ref", f"The places that are referenced may have at most {MAX_READ // 1024} KiB together."
                )
            self._places[place] = f"{len(self._places)}"
            self._unread.append(place)
        return {"$ref": DEFINITIONS + self._places[place]}

    def _find(self, pointer: str) -> Json:
        """Returns the part of the schema at a pointer, or None if there is none."""
        found = self._schema
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and part.isascii() and part.isdigit():
                place = int(part[:6])
                found = found[place] if place < len(found) else None
            else:
                found = found.get(part) if isinstance(found, dict) else None
        return found

    def _values(self, schema: dict[str, Json], name: str, at: str, depth: int, is_part: bool) -> Node:
        return self._literals(schema, name, at, ())

    def _literals(self, schema: dict[str, Json], name: str, at: str, types: tuple[str, ...]) -> Node:
        values = [schema["const"]] if name == "const" else schema["enum"]
        if not isinstance(values, list) or not values:
            raise SchemaError(f"{at}/enum", "'enum' must be a list that is not empty.")
        if not all(map(_is_exact, values)):
            raise SchemaError(
                f"{at}/{name}", "A number beyond what 64-bit floats hold, or a control character, cannot be enforced."
            )
        fitting = [value for value in values if any(_is_a(value, kind) for kind in types or _KEYWORDS)]
        if not fitting:
            raise SchemaError(f"{at}/{name}", "No value has the type.")
        return {"enum": fitting}

    def _branches(self, schema: dict[str, Json], name: str, at: str, depth: int, is_part: bool) -> Node:
        branches = schema[name]
        if not isinstance(branches, list) or not branches:
            raise SchemaError(f"{at}/{name}", f"'{name}' must be a list that is not empty.")
        is_part = is_part or (name == "allOf" and len(branches) > 1)
        nodes = [
            self._node(branch, f"{at}/{name}/{i}", depth + 1, is_part=is_part) for i, branch in enumerate(branches)
        ]
        if name == "allOf":
            return self._all(nodes)
        if name == "oneOf":
            self._exclusive.append((f"{at}/{name}", nodes))
        return nodes[0] if len(nodes) == 1 else {"anyOf": nodes}

    # --- nodes defined by a type ---

    def _types(self, schema: dict[str, Json], at: str) -> tuple[str, ...]:
        given = schema.get("type", [])
        types = [given] if isinstance(given, str) else given
        known = isinstance(types, list) and all(isinstance(kind, str) and kind in _KEYWORDS for kind in types)
        if not known or ("type" in schema and not types):
            raise SchemaError(f"{at}/type", "This type does not exist.")
        return tuple(dict.fromkeys(types))

    def _typed(
        self, schema: dict[str, Json], types: tuple[str, ...], at: str, depth: int, is_part: bool
    ) -> dict[str, Json]:
        node: dict[str, Json] = {"type": types[0] if len(types) == 1 else list(types)}
        if not {"integer", "number"}.isdisjoint(types):
            self._number(node, schema, types, at)
        if "string" in types:
            self._string(node, schema, at)
        if "array" in types:
            self._array(node, schema, at, depth, is_part)
        if "object" in types:
            self._object(node, schema, at, depth, is_part)
        patterns = node.get("pattern", ())
        if len(patterns) < 2:
            return node | ({"pattern": patterns[0]} if patterns else {})
        self._merges = True
        return {"allOf": [node | {"pattern": pattern} for pattern in patterns]}

    def _number(self, node: dict[str, Json], schema: dict[str, Json], types: tuple[str, ...], at: str) -> None:
        name = schema.get("format")
        if name is not None and "string" not in types and (not isinstance(name, str) or name not in NUMBER_FORMATS):
            raise _refused(at, "format")
        bounds = numbers.read(schema, at, is_whole="number" not in types)
        node |= bounds
        self._ranges.append(bounds)
        if "multipleOf" in node:
            self._steps.append(node["multipleOf"])

    def _string(self, node: dict[str, Json], schema: dict[str, Json], at: str) -> None:
        """Adds the keywords of strings. The patterns are a list, of the schema's own and its format's."""
        self._bounds(node, schema, "minLength", "maxLength", at)
        patterns = []
        for name in ("pattern", "format"):
            if name not in schema:
                continue
            text = schema[name]
            if not isinstance(text, str):
                raise SchemaError(f"{at}/{name}", "It must be a string.")
            if name == "format" and text not in FORMATS:
                raise _refused(at, "format")
            try:
                found = regex.whole(FORMATS[text]) if name == "format" else regex.anywhere(text)
            except regex.RegexError as error:
                raise SchemaError(f"{at}/pattern", str(error)) from None
            patterns.append(f"^(?:{found})$")
        if patterns:
            node["pattern"] = patterns

    def _array(self, node: dict[str, Json], schema: dict[str, Json], at: str, depth: int, is_part: bool) -> None:
        self._bounds(node, schema, "minItems", "maxItems", at)
        given = schema.get("prefixItems", [])
        if not isinstance(given, list):
            raise SchemaError(f"{at}/prefixItems", "'prefixItems' must be a list.")
        if given:
            node["prefixItems"] = [
                self._node(one, f"{at}/prefixItems/{i}", depth + 1, is_part=is_part) for i, one in enumerate(given)
            ]
        if "items" in schema:
            items = schema["items"]
            node["items"] = items is not False and self._node(items, f"{at}/items", depth + 1, is_part=is_part)
        if schema.get("items") is False and node.get("minItems", 0) > len(given):
            raise SchemaError(f"{at}/minItems", "There are fewer items.")

    def _object(self, node: dict[str, Json], schema: dict[str, Json], at: str, depth: int, is_part: bool) -> None:
        given = schema.get("properties", {})
        required = schema.get("required", [])
        if not isinstance(given, dict):
            raise SchemaError(f"{at}/properties", "'properties' must be an object.")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise SchemaError(f"{at}/required", "'required' must be a list of names.")
        extra = schema.get("additionalProperties", is_part or "properties" not in schema)
        missing = [i for i, name in enumerate(required) if name not in given]
        if missing and extra is False and not is_part:
            raise SchemaError(f"{at}/required/{missing[0]}", "A required property is not described.")
        if any(len(name) > MAX_NAME or not _is_exact(name) for name in (*given, *required)):
            raise SchemaError(f"{at}/properties", f"A name is longer than {MAX_NAME}, or has a control character.")
        self._num_properties += len(given) + len(missing)
        if self._num_properties > MAX_PROPERTIES:
            raise SchemaError(f"{at}/properties", f"A schema may have at most {MAX_PROPERTIES} properties.")
        if given:
            node["properties"] = {
                name: self._node(one, f"{at}/properties/{_escaped(name)}", depth + 1, is_part=is_part)
                for name, one in given.items()
            }
        if required:
            node["required"] = list(dict.fromkeys(required))
        if extra is not True:
            node["additionalProperties"] = extra is not False and self._node(
                extra, f"{at}/additionalProperties", depth + 1, is_part=is_part
            )

    def _bounds(self, node: dict[str, Json], schema: dict[str, Json], lowest: str, highest: str, at: str) -> None:
        for name in (lowest, highest):
            value = schema.get(name, 0)
            if type(value) is not int or not 0 <= value <= MAX_COUNT:
                raise SchemaError(f"{at}/{name}", f"It must be an integer from 0 to {MAX_COUNT}.")
            if name in schema:
                node[name] = value
        if highest in schema and schema.get(lowest, 0) > schema[highest]:
            raise SchemaError(f"{at}/{lowest}", f"It is above '{highest}'.")

    _by_name: ClassVar[dict[str, Callable[[_Reader, dict[str, Json], str, str, int, bool], Node]]] = {
        "$ref": _ref,
        "enum": _values,
        "const": _values,
        "anyOf": _branches,
        "oneOf": _branches,
        "allOf": _branches,
    }


def _refused(at: str, name: str, hint: str = "") -> SchemaError:
    return SchemaError(f"{at}/{_escaped(name)}", f"This keyword is not supported here. {hint}")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _is_exact(value: Json) -> bool:
    """Returns whether the grammar library writes this value, and no other."""
    match value:
        case bool() | None:
            return True
        case int() | float():
            return numbers.is_exact(value)
        case str():
            return all((char >= " " and char != "\x7f") or char in _SHORT_ESCAPES for char in value)
        case list():
            return all(map(_is_exact, value))
        case _:
            return all(_is_exact(name) and _is_exact(one) for name, one in value.items())


def _is_a(value: Json, kind: str) -> bool:
    match kind:
        case "null":
            return value is None
        case "boolean":
            return isinstance(value, bool)
        case "integer":
            return isinstance(value, int | float) and not isinstance(value, bool) and value % 1 == 0
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "string":
            return isinstance(value, str)
        case "array":
            return isinstance(value, list)
        case _:
            return isinstance(value, dict)
