"""Hard schemas: what satisfies one is let through, what does not is not, and every random text validates."""

from __future__ import annotations

import contextlib
import json
from decimal import Decimal, InvalidOperation, localcontext
from functools import cache

import jsonschema
import pytest
from hard_schemas import CASES, STRING, closed
from hypothesis import given, settings
from hypothesis import strategies as st
from walks import matches, walk

from gateway.base.errors import ApiError
from gateway.structured.form import StructuredOutputs, form_of
from workers.engine.grammars.library import GrammarError

BY_NAME = {case.name: case for case in CASES}


@cache
def form(schema: str):
    return form_of(None, StructuredOutputs(json=schema))


def number_of(text: str) -> Decimal | float:
    """A decimal, or infinity beyond what decimals hold."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def holds(schema, text) -> bool:
    """The opinion of the package jsonschema, about numbers as they are written."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    validator = jsonschema.Draft202012Validator(exact, format_checker=jsonschema.FormatChecker())
    with localcontext(prec=400):
        return validator.is_valid(json.loads(text, parse_float=number_of))


@pytest.mark.parametrize("num_texts", [12, pytest.param(100, marks=pytest.mark.rest)])
@pytest.mark.parametrize("name", BY_NAME)
def test_a_hard_schema_is_enforced(name, num_texts):
    case = BY_NAME[name]
    ours = form(json.dumps(case.schema))
    for text in case.good:
        assert matches(ours.grammar, text), text[:80]
        assert ours.is_kept(text), text[:80]
    for text in case.bad:
        assert not matches(ours.grammar, text), text[:80]
    for seed in range(num_texts):
        text = walk(ours.grammar, seed)
        if text is not None:
            assert holds(case.schema, text), text
            assert ours.is_kept(text), text


DECIMALS = st.integers(-(10**6), 10**6).flatmap(lambda n: st.sampled_from([n, n / 10, n / 100, n / 1000]))
NUMBERS = st.fixed_dictionaries(
    {"type": st.sampled_from(["number", "integer"])},
    optional={
        "minimum": DECIMALS,
        "maximum": DECIMALS,
        "exclusiveMinimum": DECIMALS,
        "exclusiveMaximum": DECIMALS,
        "multipleOf": st.sampled_from([0.01, 0.25, 0.5, 0.001, 1, 2, 3, 7, 12, 100]),
    },
)
STRINGS = st.fixed_dictionaries(
    {"type": st.just("string")},
    optional={
        "minLength": st.integers(0, 6),
        "maxLength": st.integers(3, 9),
        "pattern": st.sampled_from(["^a", "b+$", "^[a-c]*$", "\\d", "^(ab|c){2,}", 'x|"', "^.{2}-"]),
        "format": st.sampled_from(["date", "ipv4", "hostname"]),
    },
)
MEMBERS = st.builds(
    lambda names, required, extra: (
        {"type": "object", "properties": names, "required": [name for name in names if name in required]} | extra
    ),
    st.dictionaries(st.sampled_from("abc"), st.one_of(NUMBERS, STRINGS), max_size=3),
    st.sets(st.sampled_from("abc")),
    st.sampled_from([{}, {"additionalProperties": False}, {"additionalProperties": STRING}]),
)
LISTS = st.builds(
    lambda items, low, high: {"type": "array", "items": items, "minItems": low, "maxItems": high},
    st.one_of(NUMBERS, STRINGS),
    st.integers(0, 2),
    st.integers(2, 3),
)
ONE = st.one_of(
    NUMBERS, STRINGS, MEMBERS, LISTS, st.just({"type": ["string", "null"]}), st.just({"enum": [1, "a", 2.5]})
)
MERGED = st.one_of(
    ONE,
    st.lists(ONE, min_size=2, max_size=3).map(lambda parts: {"allOf": parts}),
    st.tuples(ONE, st.lists(ONE, min_size=1, max_size=3)).map(lambda pair: pair[0] | {"anyOf": pair[1]}),
    st.tuples(ONE, ONE).map(lambda pair: pair[0] | {"$ref": "#/$defs/a", "$defs": {"a": pair[1]}}),
    st.tuples(MEMBERS, MEMBERS).map(lambda pair: {"allOf": list(pair)}),
    st.tuples(NUMBERS, NUMBERS).map(lambda pair: {"allOf": list(pair)}),
    st.tuples(STRINGS, STRINGS).map(lambda pair: {"allOf": list(pair)}),
)


@settings(max_examples=300, deadline=None)
@given(MERGED, st.integers(0, 2**32))
def test_every_text_under_a_merged_schema_validates(schema, seed):
    """A schema that nothing satisfies is refused, by us or by the library; all others give valid texts."""
    try:
        ours = form(json.dumps(schema))
        text = walk(ours.grammar, seed, 200)
    except (ApiError, GrammarError):
        return
    if text is not None:
        assert holds(schema, text), text
        assert ours.is_kept(text), text


@settings(max_examples=200, deadline=None)
@given(NUMBERS, st.one_of(st.integers(-2000, 2000), DECIMALS))
def test_numbers_are_let_through_exactly_where_the_schema_holds(schema, number):
    try:
        ours = form(json.dumps(schema))
        number = int(number) if number == int(number) else number
        expected = holds(schema, json.dumps(number))
        assert matches(ours.grammar, json.dumps(number)) == expected
    except (ApiError, GrammarError):
        assert not holds(schema, json.dumps(number)) or "multipleOf" in schema


def test_a_check_of_branches_that_share_a_deep_value_takes_no_time():
    """Each level is in two branches that look at the same value: 2**60 looks without a memory."""
    level = {"type": "array", "prefixItems": [{"$ref": "#/$defs/r"}], "items": False, "minItems": 2}
    schema = {
        "$ref": "#/$defs/r",
        "$defs": {
            "r": {
                "anyOf": [
                    {"type": "null"},
                    level | {"prefixItems": [{"$ref": "#/$defs/r"}, {"const": 1}]},
                    level | {"prefixItems": [{"$ref": "#/$defs/r"}, {"const": 2}]},
                ]
            }
        },
    }
    text = "[" * 60 + "null" + ",2]" * 60
    assert form(json.dumps(schema)).is_kept(text)
    assert not form(json.dumps(schema)).is_kept(text.replace("null", "0"))


@pytest.mark.parametrize("text", ["1e999999999999999999999", "9" * 5000, "-0.0", "1e-400", "0." + "3" * 6000])
def test_numbers_of_any_length_are_read_again(text):
    anything = form(json.dumps({"type": "number"}))
    assert matches(anything.grammar, text)
    assert anything.is_kept(text)
    assert form("{}").is_kept(f"[{text}]")


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "1.5"),
        ({"type": "integer"}, "true"),
        ({"type": "number", "maximum": 0.3}, "0.30000000000000001"),
        ({"type": "number", "exclusiveMinimum": 0}, "0.0"),
        ({"type": "number", "multipleOf": 0.01}, "0.001"),
        ({"type": "number", "multipleOf": 3}, "1e400"),
        ({"type": "string", "minLength": 2}, '"a"'),
        ({"enum": [1, "a", None]}, "true"),
        ({"const": {"a": [1]}}, '{"a":[1,1]}'),
        ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, "6"),
        (closed({"a": STRING}), '{"a":"x","b":1}'),
        ({"type": "array", "prefixItems": [STRING], "items": False}, '["a",1]'),
        ({"type": "object", "required": ["a"]}, "{}"),
        ({}, "NaN"),
    ],
    ids=str,
)
def test_the_final_check_refuses_what_does_not_satisfy_the_schema(schema, text):
    assert not form(json.dumps(schema)).is_kept(text)


def members(text: str, schema) -> bool:
    return matches(form(json.dumps(schema)).grammar, text)


@pytest.mark.parametrize(
    ("pattern", "bad", "good"),
    [
        ('^[^"]{3}$', ['"\\"\\"\\""', '"a\\"b"'], ['"abc"', '"\\\\a\\n"']),
        ('^[^\\\\/:*?"<>|]{3}$', ['"\\\\ab"', '"a\\"b"', '"a/b"'], ['"a.b"']),
        ("^[\\x00-\\x1f]$", ['"\\""', '"\\\\"', '"a"'], ['"\\n"', '"\\t"']),
        ("^[^ -~]$", ['"\\""', '"\\\\"', '"a"'], ['"é"', '"\\r"']),
        ("^[^\\x20-\\uffff]$", ['"\\""', '"\\\\"'], ['"\\n"']),
        ('^[^"a-z]+$', ['"\\""', '"A\\""'], ['"A1"']),
    ],
)
def test_a_class_with_all_control_characters_lets_no_other_escape_through(pattern, bad, good):
    """The library takes such a class for every escape of JSON."""
    schema = {"type": "string", "pattern": pattern}
    assert [text for text in bad if members(text, schema)] == []
    assert [text for text in good if not members(text, schema)] == []


NARROW = [
    {"exclusiveMinimum": 0, "maximum": 0.5},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 0.1},
    {"exclusiveMinimum": 0, "maximum": 1e-7},
    {"exclusiveMinimum": 2, "maximum": 2.5},
    {"exclusiveMinimum": 1, "exclusiveMaximum": 1.0001},
    {"minimum": -0.01, "exclusiveMaximum": 0},
    {"exclusiveMinimum": -1.9, "exclusiveMaximum": -1, "multipleOf": 0.5},
]


@pytest.mark.parametrize("bounds", NARROW, ids=str)
@pytest.mark.parametrize("merged", [False, True])
def test_a_whole_number_that_is_excluded_is_never_let_out(bounds, merged):
    """The library lets it out where the other bound is less than 1 away. A schema is refused, or enforced."""
    parts = [{"type": "number", name: value} for name, value in bounds.items()]
    schema = {"allOf": parts} if merged else {"type": "number"} | bounds
    with contextlib.suppress(ApiError):
        form(json.dumps(schema))
        excluded = [value for name, value in bounds.items() if name.startswith("exclusive")]
        assert [
            text for value in excluded for text in (f"{value}", f"{value}.0", f"-{value}") if members(text, schema)
        ] == []


@pytest.mark.parametrize(
    "bounds",
    [{"exclusiveMinimum": 0, "maximum": 1}, {"exclusiveMinimum": 0}, {"exclusiveMinimum": 0.1, "maximum": 0.11}],
)
def test_other_excluded_bounds_are_enforced(bounds):
    schema = {"type": "number"} | bounds
    excluded = bounds["exclusiveMinimum"]
    assert not members(f"{excluded}", schema) and members("0.105", schema)
