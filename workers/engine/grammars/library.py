"""The library that follows grammars, llguidance: a grammar and a vocabulary give an automaton over tokens.

It takes Lark text and a vocabulary in bytes. It does not know the end tokens, which `grammar` handles.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

_PREFIX = re.compile(r"^\[[\d:]+\] \S+: ")
_HEAD = '%llguidance {"no_forcing": true}\n'
"""The option keeps the library from inserting text where only one text can follow. It would cut that text with a
tokenizer, and masks would allow only those tokens."""
_SCHEMA = re.compile(r"^\w+: %json", re.MULTILINE)
"""A rule that every grammar with a JSON schema has. Such a grammar may have many items at one place, for each property
that may come next. A client's own grammar has as many only if it is ambiguous, and the library's work grows with their
square."""
_OWN = re.compile(r"^own\d+r\d+: ", re.MULTILINE)
"""A rule of a client's own grammar inside of a larger one, with or without schemas beside it."""
_ROW_ITEMS, _SCHEMA_ROW_ITEMS = 128, 2_200
_LEXER_FUEL, _SCHEMA_LEXER_FUEL = 1_000_000, 3_000_000
"""Limit of the library's work for the lexer of a grammar, about 20 ms and 60 ms by its own figures. 128 tools with 20
parameters each need the larger one."""
_STEP_ITEMS, _STEP_ITEMS_PER_TOKEN = 20_000, 0.5
"""Limit of the library's parser for one mask: a number of items, or as many for each token of the vocabulary."""
_STEP_FUEL = 500_000
"""Limit of the library's lexer for one mask, about 40 ms by its own figures."""
_LEXER_STATES = 100_000
"""Largest number of lexer states of a grammar. All choices that follow it share them. A state takes about 1 kB, and a
string of 10,000 characters takes 70,000 of them."""
_GRAMMAR_SIZE = 20_000
"""Largest number of symbols of a grammar. A grammar of this size takes about 16 MiB."""
_MAX_MASKS = 10_000
"""Number of masks after which a grammar is compiled anew for further choices, so that states do not add up."""
_BYTES_BASE, _BYTES_PER_CHAR, _BYTES_PER_MASK = 1 << 20, 64, 8 << 10
"""Estimate of a grammar's size in bytes from its text and the masks that it gave, because each mask may make new lexer
states. The library does not report the size. Walks through a string of at most 10,000 characters took 5.5 kB a mask."""


class GrammarError(Exception):
    """A grammar cannot be used, or not any further. The message is one sentence."""


def is_installed() -> bool:
    return importlib.util.find_spec("llguidance") is not None


class Library:
    """The library over one vocabulary. Creating it imports the library."""

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        import llguidance

        self._vocab_size = len(vocabulary)
        wrapped = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(wrapped)
        self._matcher = llguidance.LLMatcher
        self._limits, self._schema_limits = (
            llguidance.LLParserLimits(
                max_items_in_row=row_items,
                step_max_items=max(_STEP_ITEMS, int(_STEP_ITEMS_PER_TOKEN * len(vocabulary))),
                initial_lexer_fuel=lexer_fuel,
                step_lexer_fuel=_STEP_FUEL,
                max_lexer_states=_LEXER_STATES,
                max_grammar_size=_GRAMMAR_SIZE,
                verbose_errors=False,
            )
            for row_items, lexer_fuel in ((_ROW_ITEMS, _LEXER_FUEL), (_SCHEMA_ROW_ITEMS, _SCHEMA_LEXER_FUEL))
        )

    def compile(self, text: str) -> Compiled:
        """Compiles a grammar in Lark. Raises `GrammarError`."""
        grammar = self._matcher.grammar_from_lark(_HEAD + text)
        limits = self._schema_limits if _SCHEMA.search(text) and not _OWN.search(text) else self._limits
        matcher = self._matcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(_sentence(matcher.get_error()))
        return Compiled(matcher, _BYTES_BASE + _BYTES_PER_CHAR * len(text), self._vocab_size)


class _Tokens:
    """The interface of a tokenizer that the library needs. Its end token is one id beyond the vocabulary, so none of
    our texts ends with it. The library never asks it to split a text into tokens: it only does so to insert text by
    itself (`_HEAD`)."""

    bos_token_id = None

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self.eos_token_id = len(vocabulary)
        self.tokens = [*vocabulary, b""]
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        return []


class Compiled:
    """A grammar ready for use. Any number of choices may start from it."""

    def __init__(self, matcher: Any, num_bytes: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.is_spent = False
        """Whether further choices need the grammar compiled anew: its states are many, or met a limit."""
        self._matcher = matcher
        self._num_bytes = num_bytes
        self._num_masks = 0

    @property
    def num_bytes(self) -> int:
        """The estimated size now. It grows with the masks."""
        return self._num_bytes + _BYTES_PER_MASK * self._num_masks

    def start(self) -> Matcher:
        return Matcher(self, self._matcher.deep_copy())

    def count_mask(self, *, has_failed: bool) -> None:
        self._num_masks += 1
        self.is_spent |= has_failed or self._num_masks >= _MAX_MASKS


class Matcher:
    """The library's automaton of one choice."""

    def __init__(self, compiled: Compiled, matcher: Any) -> None:
        self._compiled = compiled
        self._matcher = matcher

    def accept(self, token: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def fork(self) -> Matcher:
        """Returns another automaton in the same state."""
        return Matcher(self._compiled, self._matcher.deep_copy())

    def mask(self) -> bytes:
        """Returns the mask without the library's own end token. The mask is empty if one of the library's limits was
        met, and the choice cannot continue then."""
        size = 4 * -(-self._compiled.vocab_size // 32)
        if self._matcher.is_stopped():
            return bytes(size)
        data: bytes = self._matcher.compute_bitmask()[:size]
        has_failed = self._matcher.is_error()
        self._compiled.count_mask(has_failed=has_failed)
        return bytes(size) if has_failed else data

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())


def _sentence(error: object) -> str:
    """Returns the message without the library's clock and file names."""
    return _PREFIX.sub("", str(error).strip().partition("\n")[0])[:300]
