"""Clients' own grammars in EBNF: what the automaton lets through is what a naive reader of the same rules accepts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from walks import END, VOCABULARY, automaton, library, matches, of_rules, tokens_of, walk

from gateway.structured import charset, ebnf
from gateway.structured.rules import Chars, Either, Ref, Repeat, RulesError, Sequence
from workers.engine.grammars import library as library_module
from workers.engine.grammars.grammar import Automaton, begin
from workers.engine.grammars.library import GrammarError, Library

RECURSIVE = (
    'root ::= "(" root? ")" | [a-z]+ | "ab" root',
    'root ::= item | item root\nitem ::= [a-c] | "a" "b"? | "[" root "]"',
    'root ::= root "a" | "1" "2"? | [0-9]{1,3}',
    'root ::= "yes" tail\ntail ::= "true" root | "t" | "true]}" | ""',
    'root ::= "é"* [^a-z"] root? "\\u00e9"',
)
READ = [
    'root ::= "a" [\\-b]',
    'root ::= "\\x41\\e\\?\\b\\u00e9\\U0001F600"',
    'root::="a"|\n  "b"\n\n# a note\n',
    'root ::= ("a"\n"b")',
    'root ::= "a"{2} "b"{0,0} "c"{1,} "d"{2,3}',
    "root ::= a-b\na-b ::= a.c # a note\na.c ::= [a-] [-a] [\\]\\[\\^]",
    'x ::= "a"\nroot ::= x x? [^\\u0000-\\u00ff]',
    'root ::= "a" | ""',
    'root ::= "a" root | "b"',
    'root ::= "a" | []',
    'root ::= "a" ("b" | ())',
    "root ::= " + "(" * 64 + "[ab]" + " | [bc])" * 64,
    'root ::= "\\xe9" [^"]*',
]


class Naive:
    """Accepts texts by trying everything, until nothing new is found."""

    def __init__(self, grammar: str, text: str) -> None:
        self.rules, self.text = ebnf.read(grammar), text
        self.known: dict[tuple[str, int], set[int]] = {("root", 0): set()}
        before = -1
        while before != (before := sum(len(found) + 1 for found in self.known.values())):
            for name, place in list(self.known):
                self.known[name, place] |= self.ends(self.rules[name], place)

    @property
    def accepts(self) -> bool:
        return len(self.text) in self.known["root", 0]

    def ends(self, node, place):
        """Where the node can end that begins at a place, as far as it is known yet."""
        match node:
            case Chars(ranges):
                fits = place < len(self.text) and any(low <= ord(self.text[place]) <= high for low, high in ranges)
                return {place + 1} if fits else set()
            case Ref(name):
                return self.known.setdefault((name, place), set())
            case Either(parts):
                return set().union(*(self.ends(part, place) for part in parts))
            case Sequence(parts):
                found = {place}
                for part in parts:
                    found = set().union(*(self.ends(part, one) for one in found))
                return found
            case Repeat(part, low, high):
                found, now = set(), {place}
                for count in range(len(self.text) + low + 1 if high is None else high + 1):
                    found |= now if count >= low else set()
                    now = set().union(*(self.ends(part, one) for one in now))
                return found


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("grammar", [*RECURSIVE, *READ])
def test_what_is_let_through_is_what_the_rules_say(grammar, seed):
    text = walk(of_rules(grammar), seed, 30)
    if text is not None:
        assert Naive(grammar, text).accepts, text


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([*RECURSIVE, *READ]), st.text("aabcxyz12()[]yestru{}é", max_size=9))
def test_texts_are_accepted_exactly_where_the_rules_say_so(grammar, text):
    """Where a lexer would have to choose how far a word goes, too."""
    assert matches(of_rules(grammar), text) == Naive(grammar, text).accepts


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(RECURSIVE), st.integers(0, 2**32))
def test_drafts_that_are_taken_back_leave_no_trace(grammar, seed):
    """Guessed tokens, right and wrong, before each one that counts; then the way goes on as if nothing had been."""
    rng = random.Random(seed)
    one, other = (automaton(of_rules(grammar)) for _ in range(2))
    for _ in range(12):
        allowed = [token for token in tokens_of(one.mask) if token != END]
        if not allowed:
            break
        drafts = [rng.choice(allowed), *rng.choices(range(len(VOCABULARY)), k=3)]
        masks = one.tree_masks(drafts, [-1, 0, 0, 2])
        assert masks[0] == one.mask == other.mask
        for follower in (one, other):
            follower.advance(drafts[0])
        assert (one.mask, one.ended) == (other.mask, other.ended)
        if not one.ended:
            assert masks[1] == one.mask


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
        'root ::= "\\uD83D\\uDE00"',
        "root ::= [\\uD800-\\uDFFF]",
        'root ::= "a" root',
        "root ::= x\nx ::= x",
        "root ::= []",
        'root ::= "\\u{e9}"',
        'other ::= "a"',
        'root "a"',
        '"a" ::= root',
        "root ::= (" * 30,
        "root ::= " + "(" * 60_000,
        "",
    ],
)
def test_what_is_no_grammar_is_refused(grammar):
    with pytest.raises(RulesError) as caught:
        ebnf.read(grammar)
    assert str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("grammar", [of_rules('root ::= ""'), "start: x\nx: x", "start: /[a&&b]/"])
def test_what_allows_no_text_does_not_begin(grammar):
    with pytest.raises(GrammarError):
        begin(library().compile(grammar), (END,))


def test_no_set_has_a_surrogate_in_common_with_all_characters():
    assert charset.common(((0xD800, 0xDFFF),), charset.ALL) == ()
    assert charset.common(((0x41, 0x10FFFF),), charset.ALL) == ((0x41, 0xD7FF), (0xE000, 0x10FFFF))


def test_a_negated_class_holds_no_surrogates():
    one = automaton(of_rules("root ::= [^a]"))
    one.advance(0xED + 2)
    assert max(tokens_of(one.mask)) == 0x9F + 2


def test_a_limit_of_the_library_is_a_fault_of_the_choice(monkeypatch):
    monkeypatch.setattr(library_module, "_LEXER_STATES", 300)
    small = Library(VOCABULARY)
    one = Automaton(small.compile(of_rules("root ::= ([a-z]{0,30} [^a]{1,30}){0,20}")), (END,))
    for token in [ord("b") + 2] * 40:
        if one.fault:
            break
        one.advance(token)
    assert "no token of the vocabulary fits" in one.fault
