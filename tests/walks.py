"""Texts of a grammar, drawn at random through the real automaton over a vocabulary of bytes and some longer tokens."""

from __future__ import annotations

import random
from functools import cache, lru_cache

from gateway.structured import ebnf, lark
from workers.engine.grammars.grammar import Automaton, begin
from workers.engine.grammars.library import Compiled, Library

END = 1
WORDS = [b'{"', b'": ', b'", "', b"yes", b"true", b"ab", b"12", b"]}", "é".encode(), b"\xc3"]
VOCABULARY = [b"", b"", *(bytes([i]) for i in range(256)), *WORDS]


@cache
def library() -> Library:
    return Library(VOCABULARY)


def of_rules(text: str) -> str:
    """The grammar of rules in EBNF."""
    return lark.of_rules(ebnf.read(text))


def automaton(grammar: str, end_ids=(END,)) -> Automaton:
    return begin(_compiled(grammar), end_ids)


RECENT = 16
_recent: dict[str, Compiled] = {}


def _compiled(grammar: str) -> Compiled:
    """The grammar compiled once for its texts, and anew where a worker does it."""
    found = _recent.pop(grammar, None)
    if found is None or found.is_spent:
        found = library().compile(grammar)
    _recent[grammar] = found
    if len(_recent) > RECENT:
        del _recent[next(iter(_recent))]
    return found


@lru_cache(maxsize=4096)
def tokens_of(mask: bytes) -> tuple[int, ...]:
    return tuple(8 * at + bit for at, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1)


def allows(mask: bytes, token: int) -> bool:
    return bool(mask[token // 8] >> (token % 8) & 1)


def ids(text: str) -> list[int]:
    return [byte + 2 for byte in text.encode()]


def matches(grammar: str, text: str) -> bool:
    """Byte by byte, and the text may end there."""
    one = automaton(grammar)
    for place, token in enumerate(ids(text)):
        if one.ended or not allows(one.mask, token):
            return False
        one.advance(token)
        assert not one.fault or place
    return one.ended or allows(one.mask, END)


def walk(grammar: str, seed: int, max_tokens: int = 600) -> str | None:
    """Returns a text, or None if it was not at its end after so many tokens."""
    rng = random.Random(seed)
    one, text = automaton(grammar), b""
    for _ in range(max_tokens):
        allowed = tokens_of(one.mask)
        assert allowed, "a mask is never empty"
        if END in allowed and rng.random() < 0.5:
            return text.decode()
        texts = [token for token in allowed if token != END]
        closing = [token for token in texts if VOCABULARY[token] in (b'"', b"]", b"}")]
        token = rng.choice(closing if closing and rng.random() < 0.5 else texts)
        text += VOCABULARY[token]
        one.advance(token)
        assert not one.fault, one.fault
        if one.ended:
            return text.decode()
    return None
