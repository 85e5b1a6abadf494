"""The library that follows a grammar, behind `grammar.Backend`: xgrammar.

It takes EBNF text and a vocabulary in bytes. It is not told of end tokens: those are `grammar`'s.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from typing import Any

from workers.engine.sampling.grammar import Backend, GrammarError, Matcher

_PREFIX = re.compile(r"^\[[\d:]+\] \S+: ")


def installed() -> bool:
    return importlib.util.find_spec("xgrammar") is not None


def load(vocabulary: Sequence[bytes]) -> Backend:
    """Imports the library, which takes a second."""
    return XGrammar(vocabulary)


class XGrammar:
    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        import xgrammar

        self._library = xgrammar
        self._info = xgrammar.TokenizerInfo(
            list(vocabulary),
            xgrammar.VocabType.RAW,
            vocab_size=len(vocabulary),
            stop_token_ids=[],
        )
        self._compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)

    def compile(self, text: str) -> XGrammarCompiled:
        try:
            return XGrammarCompiled(self._library, self._compiler.compile_grammar(text))
        except (RuntimeError, ValueError) as error:  # the latter for a message that is no UTF-8
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


def _sentence(error: object) -> str:
    """Without the library's clock and file names."""
    return _PREFIX.sub("", str(error).strip().partition("\n")[0])[:300]
