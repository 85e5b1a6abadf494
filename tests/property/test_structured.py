"""Schemas and expressions drawn at random: every text that the automaton lets through is what was asked for."""

from __future__ import annotations

import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import SCHEMAS, declared_once, satisfies
from walks import matches, walk

from gateway.structured.form import StructuredOutputs, form_of
from workers.engine.grammars.library import GrammarError


@settings(max_examples=60, deadline=None)
@given(SCHEMAS, st.integers(0, 2**32))
def test_every_text_of_a_schemas_grammar_satisfies_the_schema(schema, seed):
    form = form_of(None, StructuredOutputs(json=schema))
    text = walk(form.grammar, seed)
    if text is not None:
        assert satisfies(schema, json.loads(text, object_pairs_hook=declared_once(schema))), text
        assert form.is_kept(text)


@settings(max_examples=60, deadline=None)
@given(st.integers(-2000, 2000), st.integers(0, 2500), st.integers(-5000, 5000))
def test_a_grammar_of_bounds_holds_exactly_the_integers_within(low, span, number):
    schema = {"type": "integer", "minimum": low, "maximum": low + span}
    grammar = form_of(None, StructuredOutputs(json=schema)).grammar
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
    grammar = form_of(None, StructuredOutputs(regex=pattern)).grammar
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
