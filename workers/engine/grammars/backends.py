"""The libraries that follow a grammar, as implementations of `grammar.Backend`: xgrammar, or llguidance.

They take EBNF text and a vocabulary in bytes. They do not know the end tokens, which `grammar` handles.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any, Literal

from workers.engine.grammars import ebnf, lark
from workers.engine.grammars.grammar import Backend, GrammarError, Matcher

Name = Literal["xgrammar", "llguidance"]

_PREFIX = re.compile(r"^\[[\d:]+\] \S+: ")
_STEP_ITEMS, _STEP_FUEL = 2_000_000, 1_000_000
"""Limits of llguidance's parser and lexer for one mask. They are about 100 ms each by its own figures, less than
`grammar.SLOW_S`."""
_LEXER_STATES = 20_000
"""Largest number of lexer states for each choice that follows a grammar. A state takes 1 to 2 kB."""
_BYTES_BASE, _BYTES_PER_CHAR = 1 << 16, 16
"""Upper estimate of a grammar's size in bytes, for grammars of a JSON schema. llguidance does not report the size."""


def installed(name: Name) -> bool:
    return importlib.util.find_spec(name) is not None


def load(vocabulary: Sequence[bytes], name: Name = "xgrammar") -> Backend:
    """Imports the library, which takes a second."""
    return XGrammar(vocabulary) if name == "xgrammar" else LLGuidance(vocabulary)


class XGrammar:
    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        import xgrammar

        self._library = xgrammar
        self._info = xgrammar.TokenizerInfo(
            list(vocabulary), xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[]
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def compile(self, text: str) -> XGrammarCompiled:
        try:
            return XGrammarCompiled(self._library, self._compiler.compile_grammar(text))
        except (RuntimeError, ValueError) as error:  # a ValueError comes for a message that is no UTF-8
            raise GrammarError(_sentence(error)) from None


class XGrammarCompiled:
    def __init__(self, library: Any, compiled: Any) -> None:
        self.num_bytes: int = compiled.memory_size_bytes
        self.vocab_size: int = compiled.tokenizer_info.vocab_size
        self._library = library
        self._compiled = compiled

    def start(self) -> Matcher:
        matcher = self._library.GrammarMatcher(self._compiled)
        words = self._library.allocate_token_bitmask(1, self.vocab_size)
        return XGrammarMatcher(matcher, words)


class XGrammarMatcher:
    def __init__(self, matcher: Any, words: Any) -> None:
        self._matcher = matcher
        self._words = words

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def fork(self) -> Matcher:
        return XGrammarMatcher(self._matcher.fork(), self._words)

    def mask(self) -> bytes:
        self._matcher.fill_next_token_bitmask(self._words)
        data: bytes = self._words.numpy().tobytes()
        return data

    def may_end(self) -> bool:
        return bool(self._matcher.is_completed())


class LLGuidance:
    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        import llguidance

        self._library = llguidance
        self._vocab_size = len(vocabulary)
        wrapped = llguidance.TokenizerWrapper(_Tokens(vocabulary))
        self._tokenizer = llguidance.LLTokenizer(wrapped)
        self._limits = llguidance.LLParserLimits(
            step_max_items=_STEP_ITEMS, step_lexer_fuel=_STEP_FUEL, max_lexer_states=_LEXER_STATES, verbose_errors=False
        )

    def compile(self, text: str) -> LLGuidanceCompiled:
        try:
            written = lark.write(ebnf.read(text))
        except ebnf.EbnfError as error:
            raise GrammarError(str(error)) from None
        except RecursionError:
            raise GrammarError("the grammar is nested too deep") from None
        library = self._library.LLMatcher
        grammar = library.grammar_from_lark(written)
        matcher = library(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise GrammarError(_sentence(matcher.get_error()))
        num_bytes = _BYTES_BASE + _BYTES_PER_CHAR * len(written)
        return LLGuidanceCompiled(matcher, num_bytes, self._vocab_size)


class _Tokens:
    """The interface of a tokenizer that the library needs. Its end token is one id beyond the vocabulary, so none of
    our texts ends with it. The library never asks it to split a text into tokens: it only does so to insert text by
    itself (`lark`)."""

    bos_token_id = None

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self.eos_token_id = len(vocabulary)
        self.tokens = [*vocabulary, b""]
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        return []


class LLGuidanceCompiled:
    def __init__(self, matcher: Any, num_bytes: int, vocab_size: int) -> None:
        self.num_bytes = num_bytes
        self.vocab_size = vocab_size
        self._matcher = matcher

    def start(self) -> Matcher:
        return LLGuidanceMatcher(self._matcher.deep_copy(), self.vocab_size)


class LLGuidanceMatcher:
    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def accept(self, token: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token]) == 1)

    def fork(self) -> Matcher:
        return LLGuidanceMatcher(self._matcher.deep_copy(), self._vocab_size)

    def mask(self) -> bytes:
        """Returns the mask without the library's own end token. The mask is empty if one of the library's limits was
        met, and the choice cannot continue then."""
        size = 4 * -(-self._vocab_size // 32)
        if self._matcher.is_stopped():
            return bytes(size)
        data: bytes = self._matcher.compute_bitmask()[:size]
        return bytes(size) if self._matcher.is_error() else data

    def may_end(self) -> bool:
        return bool(self._matcher.is_accepting())


def _sentence(error: object) -> str:
    """Returns the message without the library's clock and file names."""
    return _PREFIX.sub("", str(error).strip().partition("\n")[0])[:300]
