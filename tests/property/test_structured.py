"""Schemas and expressions drawn at random: every text that the automaton lets through is what was asked for."""

from __future__ import annotations

import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from walks import matches, walk

from gateway.structured import numbers, regex
from gateway.structured.form import StructuredOutputs, form_of
from workers.engine.sampling.grammar import GrammarError

NAMES = st.sampled_from(["a", "ab", "é", 'q"', "", "long name"])
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(-99, 99), st.text('ab"\\\né', max_size=4))


def bounded(kind, low, high):
    return st.tuples(st.integers(0, 3), st.integers(0, 3)).map(
        lambda pair: {"type": kind, low: min(pair), high: max(pair)}
    )


LEAVES = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("null", "boolean", "integer", "number", "string")]),
    st.lists(SCALARS, min_size=1, max_size=3).map(lambda values: {"enum": values}),
    SCALARS.map(lambda value: {"const": value}),
    bounded("string", "minLength", "maxLength"),
    st.tuples(st.integers(-1200, 1200), st.integers(0, 300)).map(
        lambda pair: {"type": "integer", "minimum": pair[0], "maximum": sum(pair)}
    ),
    st.sampled_from(["date", "ipv4", "uuid", "time"]).map(lambda name: {"type": "string", "format": name}),
)  # fmt: skip


def objects(inner):
    return st.builds(
        lambda properties, required, extra: {
            "type": "object",
            "properties": properties,
            "required": [name for name in properties if name in required],
            "additionalProperties": extra,
        },
        st.dictionaries(NAMES, inner, max_size=4),
        st.sets(NAMES),
        st.one_of(st.just(False), inner),
    )


def arrays(inner):
    return st.builds(
        lambda sizes, prefix, items: sizes | {"prefixItems": prefix, "items": items},
        bounded("array", "minItems", "maxItems"),
        st.lists(inner, max_size=2),
        inner,
    )


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner), arrays(inner), st.lists(inner, min_size=1, max_size=3).map(lambda parts: {"anyOf": parts})
    ),
    max_leaves=6,
)  # fmt: skip


def satisfies(schema, value):
    """Plain JSON Schema for what is drawn here, read from the schema itself."""
    if "anyOf" in schema:
        return any(satisfies(part, value) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        known = schema.get("enum", [schema.get("const")])
        return json.dumps(value) in map(json.dumps, known)
    kind = schema["type"]
    if kind == "object":
        if not isinstance(value, dict) or not set(schema["required"]) <= set(value):
            return False
        extra = schema["additionalProperties"]
        inner = {name: schema["properties"].get(name, extra) for name in value}
        return all(
            part is not False and satisfies(part, value[name]) for name, part in inner.items()
        )
    if kind == "array":
        if (
            not isinstance(value, list)
            or not schema["minItems"] <= len(value) <= schema["maxItems"]
        ):
            return False
        prefix = schema["prefixItems"]
        parts = prefix[: len(value)] + [schema["items"]] * (len(value) - len(prefix))
        return all(satisfies(part, item) for part, item in zip(parts, value, strict=True))
    if kind == "string":
        return isinstance(value, str) and schema.get("minLength", 0) <= len(value) <= schema.get(
            "maxLength", 999
        )
    if kind == "integer":
        return type(value) is int and schema.get("minimum", value) <= value <= schema.get(
            "maximum", value
        )
    kinds = {"null": type(None), "boolean": bool, "number": (int, float)}
    return isinstance(value, kinds[kind]) and (kind != "number" or not isinstance(value, bool))  # fmt: skip


def pairs_once(pairs):
    assert len(dict(pairs)) == len(pairs), "a name twice"
    return dict(pairs)


@settings(max_examples=60, deadline=None)
@given(SCHEMAS, st.integers(0, 2**32))
def test_every_text_of_a_schemas_grammar_satisfies_the_schema(schema, seed):
    form = form_of(None, StructuredOutputs(json=schema))
    text = walk(form.grammar, seed)
    if text is not None:
        assert satisfies(schema, json.loads(text, object_pairs_hook=pairs_once)), text
        assert form.is_kept(text)


@settings(max_examples=60, deadline=None)
@given(st.integers(-2000, 2000), st.integers(0, 2500), st.integers(-5000, 5000))
def test_a_grammar_of_bounds_holds_exactly_the_integers_within(low, span, number):
    grammar = f"root ::= {numbers.between(low, low + span)}\n"
    for one in (number, low, low + span, low - 1, low + span + 1):
        assert matches(grammar, str(one)) == (low <= one <= low + span)


ATOMS = st.sampled_from(["a", "b", ".", r"\d", "[ab]", "[^a]", r"\.", "é"])
PATTERNS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{0,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
    ),
    max_leaves=5,
)


@settings(max_examples=80, deadline=None)
@given(PATTERNS, st.text("ab1.é\n", max_size=5), st.integers(0, 2**32))
def test_an_expressions_grammar_holds_what_python_matches(pattern, text, seed):
    grammar = f"root ::= {regex.whole(pattern)}\n"
    try:
        drawn = walk(grammar, seed, 80)
    except GrammarError:  # nothing but the empty text
        drawn = None
    assert matches(grammar, text) == bool(re.fullmatch(pattern, text, re.ASCII))
    assert drawn is None or re.fullmatch(pattern, drawn, re.ASCII), drawn


@settings(max_examples=60, deadline=None)
@given(PATTERNS, st.text('ab1."\\\n', max_size=5))
def test_a_pattern_in_a_schema_matches_anywhere_in_the_string(pattern, text):
    form = form_of(None, StructuredOutputs(json={"type": "string", "pattern": pattern}))
    written = json.dumps(text, ensure_ascii=False)
    assert matches(form.grammar, written) == bool(re.search(pattern, text, re.ASCII))
