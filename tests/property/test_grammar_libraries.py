"""The two libraries that follow grammars allow the same tokens at every place of every text."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schemas import SCHEMAS
from walks import END, LIBRARIES, VOCABULARY, backend, tokens_of

from gateway.structured.form import StructuredOutputs, form_of
from workers.engine.grammars import backends, vocabulary
from workers.engine.grammars.grammar import Automaton, GrammarError, begin

pytest.importorskip("llguidance")

DEMO = Path(__file__).parents[2] / "ops" / "demo_model" / "model"
DEMO_SIZE = 4096
DEMO_END = 2
RECURSIVE = (
    'root ::= "(" root? ")" | [a-z]+ | "ab" root',
    'root ::= item | item root\nitem ::= [a-c] | "a" "b"? | "[" root "]"',
    'root ::= root "a" | "1" "2"? | [0-9]{1,3}',
    'root ::= "yes" tail\ntail ::= "true" root | "t" | "true]}" | ""',
    'root ::= "é"* [^a-z"] root? "\\u00e9"',
)


SURROGATES = b"\xed"
"""First byte of encoded surrogates, and of much else. xgrammar's negated classes go on to surrogates from there, which
no UTF-8 text has; llguidance's do not. Nobody walks there."""


@cache
def demo(name):
    return backends.load(vocabulary.read(DEMO, DEMO_SIZE), name)


ANY = [token for token, text in enumerate(VOCABULARY) if not text.endswith(SURROGATES)]


def allowed_of(automaton, texts, end):
    tokens = tokens_of(automaton.mask)
    return [token for token in tokens if token != end and not texts[token].endswith(SURROGATES)]


def walk_both(compiled, texts, end, seed, num_tokens=60):
    """One way through both, any allowed token after any; the text that it says."""
    rng = random.Random(seed)
    one, other = (begin(each, (end,)) for each in compiled)
    text = b""
    for _ in range(num_tokens):
        assert (one.mask, one.ended) == (other.mask, other.ended), text
        assert not one.fault and not other.fault, (text, one.fault, other.fault)
        allowed = allowed_of(one, texts, end)
        if not allowed:
            break
        closing = [token for token in allowed if texts[token] in (b'"', b"]", b"}", b")", b",")]
        token = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
        text += texts[token]
        for automaton in (one, other):
            automaton.advance(token)
    return text


@settings(max_examples=60, deadline=None)
@given(SCHEMAS, st.integers(0, 2**32))
def test_of_any_schema_over_a_trained_vocabulary(schema, seed):
    grammar = form_of(None, StructuredOutputs(json=schema)).grammar
    compiled = [demo(name).compile(grammar) for name in LIBRARIES]
    walk_both(compiled, vocabulary.read(DEMO, DEMO_SIZE), DEMO_END, seed)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "outputs",
    [
        {"json_object": True},
        {"json": {"type": "object", "properties": {"a": {}}, "additionalProperties": True}},
        {"regex": r"(é|\w)+\s?x{2,4}"},
        {"choice": ["yes", "yesterday", "no", 'a "quote"', "\x7f"]},
    ],
    ids=str,
)
def test_of_every_form_over_a_trained_vocabulary(outputs, seed):
    grammar = form_of(None, StructuredOutputs(**outputs)).grammar
    compiled = [demo(name).compile(grammar) for name in LIBRARIES]
    walk_both(compiled, vocabulary.read(DEMO, DEMO_SIZE), DEMO_END, seed)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("grammar", RECURSIVE)
def test_of_grammars_whose_words_begin_or_end_alike(grammar, seed):
    """Where a lexer would have to choose how far a word goes."""
    compiled = [backend(name).compile(grammar) for name in LIBRARIES]
    walk_both(compiled, VOCABULARY, END, seed)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(RECURSIVE), st.integers(0, 2**32))
def test_of_drafts_that_are_taken_back(grammar, seed):
    """Guessed tokens, right and wrong, before each one that counts; then the way goes on as if nothing had been."""
    rng = random.Random(seed)
    one, other = (begin(backend(name).compile(grammar), (END,)) for name in LIBRARIES)
    for _ in range(12):
        allowed = allowed_of(one, VOCABULARY, END)
        if not allowed:
            break
        drafts = [rng.choice(allowed), *rng.choices(ANY, k=3)]
        parents = [-1, 0, 0, 2]
        assert one.masks(drafts) == other.masks(drafts)
        assert one.tree_masks(drafts, parents) == other.tree_masks(drafts, parents)
        token = rng.choice(allowed)
        for automaton in (one, other):
            automaton.advance(token)
        assert (one.mask, one.ended) == (other.mask, other.ended)


READ = [
    'root ::= "a" [\\-b]',
    'root ::= "\\x41\\e\\?\\b\\u00e9\\U0001F600"',
    'root::="a"|\n  "b"\n\n# a note\n',
    'root ::= ("a"\n"b")',
    'root ::= "a"{2} "b"{0,0} "c"{1,} "d"{2,3}',
    "root ::= a-b\na-b ::= a.c # a note\na.c ::= [a-] [-a] [\\]\\[\\^]",
    'x ::= "a"\nroot ::= x x? [^\\u0000-\\u00ff]',
    'root ::= "a" | ""',
    'root ::= "a" | []',
    'root ::= "a" ("b" | ())',
    "root ::= " + "(" * 64 + "[ab]" + " | [bc])" * 64,
    form_of(None, StructuredOutputs(regex="(" * 64 + "a" + "b|c)" * 64)).grammar,
    'root ::= "\\xe9" [^"]*',
]


@pytest.mark.parametrize("grammar", READ)
def test_of_everything_that_the_notation_has(grammar):
    compiled = [backend(name).compile(grammar) for name in LIBRARIES]
    for seed in range(3):
        walk_both(compiled, VOCABULARY, END, seed)


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= .",
        'root ::= "a" b',
        'root ::= a\na ::= "x"\na ::= "y"',
        'root ::= "a"{,2}',
        'root ::= "a"{3,2}',
        "root ::= [\\d]",
        "root ::= [b-a]",
        'root ::= (= "a") "a"',
        'root ::= "\\q"',
        'root ::= "a"**',
        "root ::= 'a'",
        'root ::= "\n"',
        "root ::= [a\nb]",
        'root ::= "a" | ',
        "root ::= /ab+/",
        'root ::= "\\u{e9}"',
        'other ::= "a"',
        'root "a"',
        '"a" ::= root',
        "root ::= (" * 30,
        "root ::= " + "(" * 60_000,
        "",
    ],
)
@pytest.mark.parametrize("name", LIBRARIES)
def test_both_refuse_what_is_no_grammar(name, grammar):
    with pytest.raises(GrammarError) as caught:
        backend(name).compile(grammar)
    assert str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize("grammar", ['root ::= ""', "root ::= x\nx ::= x", "root ::= []"])
def test_what_allows_no_text_does_not_begin(name, grammar):
    with pytest.raises(GrammarError):
        begin(backend(name).compile(grammar), (END,))


def test_a_negated_class_of_a_clients_own_holds_no_surrogates():
    one = begin(backend("llguidance").compile("root ::= [^a]"), (END,))
    one.advance(0xED + 2)
    assert max(tokens_of(one.mask)) == 0x9F + 2


def test_a_limit_of_the_library_is_a_fault_of_the_choice(monkeypatch):
    monkeypatch.setattr(backends, "_LEXER_STATES", 300)
    small = backends.load(VOCABULARY, "llguidance")
    one = Automaton(small.compile("root ::= ([a-z]{0,30} [^a]{1,30}){0,20}"), (END,))
    for token in [ord("b") + 2] * 40:
        if one.fault:
            break
        one.advance(token)
    assert "no token of the vocabulary fits" in one.fault
