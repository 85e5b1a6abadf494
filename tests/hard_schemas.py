"""JSON schemas that are hard to enforce, each with documents that satisfy it and documents that do not.

`tests/property/test_hard_schemas.py` holds our grammars against them, and `benchmarks/grammars.py` compares libraries
with them. Documents are compact JSON with keys in the schema's order, so that every library's way of writing allows
them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Case:
    name: str
    schema: Any
    good: tuple[str, ...]
    bad: tuple[str, ...]


def case(name: str, schema: Any, good: list[Any], bad: list[Any]) -> Case:
    """Documents are values, or JSON as bytes where its spelling matters."""
    return Case(name, schema, tuple(map(_text, good)), tuple(map(_text, bad)))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def closed(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    required = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}


STRING, INTEGER, NUMBER = {"type": "string"}, {"type": "integer"}, {"type": "number"}
TREE = {"$ref": "#/$defs/tree"}
PERSON = closed({"name": {"type": "string", "minLength": 1}, "age": {"type": "integer", "minimum": 0}})
FIELDS = {f"field_{i}": {"type": ["string", "null"], "maxLength": 40} for i in range(120)}
RECORD = {name: None if i % 3 else "x" * (i % 41) for i, name in enumerate(FIELDS)}

CASES = [
    # numbers
    case("integer bounds", {"type": "integer", "minimum": -12, "exclusiveMaximum": 305}, [-12, 0, 304], [-13, 305]),
    case("integer range of a date", {"type": "integer", "minimum": 19700101, "maximum": 20991231}, [20240229], [1970]),
    case("integer below a bound", {"type": "integer", "exclusiveMaximum": 0}, [-1, -100000], [0, 1]),
    case("integer of 64 bits", {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, [0, -(10**17)], [2**63]),
    case("number bounds", {"type": "number", "minimum": 0, "maximum": 1}, [0, 0.25, 1], [-0.1, 1.01, 2]),
    case(
        "number exclusive bounds",
        {"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 12.75},
        [-0.49, 0, 12.7499, 3],
        [-0.5, -1, 12.75, 13],
    ),
    case("number above a bound", {"type": "number", "exclusiveMinimum": 0}, [0.001, 7, 123456.5], [0, -1]),
    case("number of any size", NUMBER, [0, -1.5, 2e-3, 6.02e23], ["1", None, b"01", b".5", b"1."]),
    case("multiple of an integer", {"type": "integer", "multipleOf": 15}, [0, 15, -45, 300], [1, 20, -16]),
    case("multiple of cents", {"type": "number", "multipleOf": 0.01}, [0, 1.25, 19.99, -3], [0.005, 19.999]),
    case(
        "multiple within bounds",
        {"type": "integer", "minimum": 100, "maximum": 1000, "multipleOf": 25},
        [100, 125, 1000],
        [75, 110, 1025],
    ),
    # strings
    case("string length", {"type": "string", "minLength": 2, "maxLength": 5}, ["ab", "é\n", "abcde"], ["a", "abcdef"]),
    case("string length of thousands", {"type": "string", "maxLength": 4000}, ["", "word " * 800], ["word " * 801]),
    case("pattern anywhere", {"type": "string", "pattern": "b+c"}, ["abbc!", "bc"], ["ac", ""]),
    case("pattern with a quote", {"type": "string", "pattern": '^"\\d\\\\$'}, ['"7\\'], ["7", '"7']),
    case("pattern of a product code", {"type": "string", "pattern": "^[A-Z]{3}-\\d{4}$"}, ["ABC-1234"], ["ABC-123"]),
    case(
        "pattern with length",
        {"type": "string", "pattern": "^[a-z]+(-[a-z]+)*$", "minLength": 5, "maxLength": 12},
        ["hello", "a-b-c-d-e-f"],
        ["abcd", "a-b-c-d-e-f-g", "Hello"],
    ),
    case(
        "pattern anywhere with length",
        {"type": "string", "pattern": "\\d\\d", "minLength": 4, "maxLength": 6},
        ["ab12", "1234", "a12b"],
        ["12", "abcd", "a1b2c3", "abcde12"],
    ),
    case("pattern of alternatives", {"type": "string", "pattern": "^a|b$"}, ["ax", "xb"], ["xa", "bx"]),
    case(
        "formats",
        closed({"day": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}}),
        [{"day": "2024-12-31", "id": "123e4567-e89b-12d3-a456-426614174000"}],
        [{"day": "2023-02-30", "id": "123e4567-e89b-12d3-a456-426614174000"}, {"day": "2024-12-31", "id": "1"}],
    ),
    case(
        "format with length",
        {"type": "string", "format": "email", "maxLength": 12},
        ["a@b.cc"],
        ["a", "someone@example"],
    ),
    case("enum of texts with quotes", {"enum": ['say "x"', "a\\b", "ü"]}, ['say "x"', "a\\b", "ü"], ["x", ""]),
    case(
        "enum of all kinds", {"enum": [1, "1", None, True, {"a": [1.5]}]}, [1, "1", True, {"a": [1.5]}], [2, False, []]
    ),
    case("enum of 500", {"enum": [f"value {i}" for i in range(500)]}, ["value 0", "value 499"], ["value", "value 500"]),
    case("const", {"const": {"version": 2, "tags": []}}, [{"version": 2, "tags": []}], [{"version": 3, "tags": []}]),
    # arrays
    case("array length", {"type": "array", "items": INTEGER, "minItems": 2, "maxItems": 4}, [[1, 2]], [[1], [1] * 5]),
    case("array of a thousand", {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 1000}, [[1] * 300], [[2]]),
    case(
        "tuple",
        {"type": "array", "prefixItems": [STRING, INTEGER], "items": False, "minItems": 2},
        [["a", 1]],
        [["a"], ["a", 1, 2], [1, "a"]],
    ),
    case(
        "tuple with a tail",
        {"type": "array", "prefixItems": [{"const": "sum"}], "items": NUMBER, "minItems": 3},
        [["sum", 1, 2.5]],
        [["sum", 1], ["max", 1, 2]],
    ),
    case(
        "matrix",
        {"type": "array", "items": {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}},
        [[[1, 2]]],
        [[[1]]],
    ),
    # objects
    case(
        "optional properties",
        closed({"a": INTEGER, "b": STRING, "c": INTEGER}, ["b"]),
        [{"b": ""}, {"a": 1, "b": "", "c": 2}],
        [{}, {"a": 1}],
    ),
    case(
        "names that need escapes", closed({'q"': INTEGER, "é": INTEGER, "": INTEGER}), [{'q"': 1, "é": 2, "": 3}], [{}]
    ),
    case(
        "map of integers",
        {"type": "object", "additionalProperties": INTEGER},
        [{}, {"a": 1, "any name": 2}],
        [{"a": "1"}],
    ),
    case(
        "listed and further names",
        {"type": "object", "properties": {"id": INTEGER}, "required": ["id"], "additionalProperties": STRING},
        [{"id": 1}, {"id": 1, "x": "y", "ident": "z"}],
        [{"x": "y"}, {"id": "1"}, {"id": 1, "x": 2}, b'{"id":1,"id":2}', b'{"id":1,"\\u0069d":"x"}'],
    ),
    case(
        "120 optional properties",
        closed(FIELDS, []),
        [RECORD, {"field_7": None, "field_119": "z"}],
        [{"field_120": None}],
    ),
    case(
        "one of two properties",
        {
            "type": "object",
            "properties": {"a": INTEGER, "b": INTEGER},
            "additionalProperties": False,
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}],
        [{}],
    ),
    # combinations
    case(
        "nullable reference",
        closed({"owner": {"anyOf": [{"$ref": "#/$defs/p"}, {"type": "null"}]}}, **{"$defs": {"p": PERSON}}),
        [{"owner": None}, {"owner": {"name": "A", "age": 3}}],
        [{"owner": {"name": "", "age": 3}}, {"owner": 1}],
    ),
    case(
        "union by a tag",
        {
            "oneOf": [
                closed({"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}}),
                closed({"kind": {"const": "square"}, "side": NUMBER}),
            ]
        },
        [{"kind": "circle", "radius": 1.5}, {"kind": "square", "side": 2}],
        [{"kind": "circle", "side": 2}, {"kind": "circle", "radius": 0}],
    ),
    case(
        "union of references",
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": STRING, "b": {"enum": [1, 2]}}},
        ["x", 2],
        [3, None],
    ),
    case("oneOf of numbers", {"oneOf": [{"const": 1}, {"const": 20}, {"type": "null"}]}, [1, 20, None], [2]),
    case(
        "allOf of objects",
        {
            "allOf": [
                {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]},
                {"type": "object", "properties": {"b": STRING}, "required": ["b"]},
            ]
        },
        [{"a": 1, "b": "x"}],
        [{"a": 1}, {"b": "x"}, {"a": "x", "b": "x"}],
    ),
    case(
        "allOf of references",
        {
            "allOf": [{"$ref": "#/$defs/base"}, {"properties": {"age": {"maximum": 99}}, "required": ["age"]}],
            "$defs": {"base": {"type": "object", "properties": {"age": {"type": "integer", "minimum": 18}}}},
        },
        [{"age": 18}, {"age": 99}],
        [{"age": 17}, {"age": 100}, {}],
    ),
    case(
        "allOf of bounds",
        {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}, {"multipleOf": 4}]},
        [8],
        [4, 9, 12],
    ),
    case(
        "allOf of patterns",
        {"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "z$"}, {"maxLength": 4}]},
        ["az", "abcz"],
        ["a", "z", "abcdz"],
    ),
    case(
        "reference with a sibling",
        {"$ref": "#/$defs/s", "maxLength": 3, "$defs": {"s": {"type": "string", "minLength": 2}}},
        ["ab", "abc"],
        ["a", "abcd"],
    ),
    case(
        "tree",
        {**TREE, "$defs": {"tree": closed({"value": INTEGER, "children": {"type": "array", "items": TREE}})}},
        [{"value": 1, "children": [{"value": 2, "children": []}]}],
        [{"value": 1, "children": [{}]}],
    ),
    case(
        "linked list",
        closed({"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
        [{"next": {"next": {"next": None}}}],
        [{"next": 1}, {}],
    ),
    case("any value", {}, [1, {"a": [None, {"b": ""}]}], [b"01", b"{a:1}"]),
]
