"""Finds a model's control tokens in text. The module is pure: it only finds them and changes nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

WINDOW_CHARS = 64 * 1024
"""The length of one search, which holds the interpreter lock; this bounds the time."""


class ControlTokens:
    def __init__(self, texts: Sequence[str]) -> None:
        self._pattern = re.compile(_trie_pattern(texts)) if texts else None
        self._longest = max((len(text) for text in texts), default=0)
        self._heads = frozenset(text[:size] for text in texts for size in range(1, len(text)))
        self._tails = frozenset(text[-size:] for text in texts for size in range(1, len(text)))
        self._firsts = frozenset(text[0] for text in texts)
        self._lasts = frozenset(text[-1] for text in texts)

    def tokens(self, text: str) -> Iterator[tuple[int, str]]:
        """Yields (place, token) without overlaps: leftmost, then longest, as the tokenizer itself matches."""
        place = 0
        while (match := self._search(text, place)) is not None:
            yield match.start(), match[0]
            place = match.end()

    def places(self, text: str) -> Iterator[int]:
        """Yields the places where a token begins, overlapping ones included."""
        place = 0
        while (match := self._search(text, place)) is not None:
            yield match.start()
            place = match.start() + 1

    def begins_in(self, text: str) -> bool:
        """Returns whether the end of `text` is the beginning of a token."""
        if self._firsts.isdisjoint(text[-self._longest :]):
            return False
        return any(text[-size:] in self._heads for size in range(1, min(len(text), self._longest) + 1))

    def ends_in(self, text: str) -> bool:
        """Returns whether the beginning of `text` is the end of a token."""
        if self._lasts.isdisjoint(text[: self._longest]):
            return False
        return any(text[:size] in self._tails for size in range(1, min(len(text), self._longest) + 1))

    def _search(self, text: str, start: int) -> re.Match[str] | None:
        if self._pattern is None:
            return None
        while start < len(text):
            # The longest token that begins inside of the window ends inside of the search.
            match = self._pattern.search(text, start, start + WINDOW_CHARS + self._longest)
            if match is not None and match.start() < start + WINDOW_CHARS:
                return match
            start += WINDOW_CHARS
        return None


def _trie_pattern(texts: Sequence[str]) -> str:
    """Returns an expression whose cost per character does not grow with the number of tokens; the
    longest token wins.
    """
    trie: dict[str, Any] = {}
    for text in texts:
        node = trie
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _alternatives(trie)


def _alternatives(trie: dict[str, Any]) -> str:
    branches = [re.escape(char) + _alternatives(rest) for char, rest in trie.items() if char]
    if not branches:
        return ""
    return f"(?:{'|'.join(branches)}){'?' if '' in trie else ''}"
