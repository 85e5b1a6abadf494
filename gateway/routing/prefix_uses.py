"""The beginnings of prompts that are used most, by the hash of their first group of 64 tokens. The module is pure, and
what it holds is bounded.

A hash is keyed and holds the caller's namespace: it tells nothing of the text, and two tenants' equal texts differ.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

MOST = 1_000
"""Beginnings that are kept when there are twice as many."""


@dataclass(slots=True)
class PrefixUse:
    model: str
    is_public: bool
    """The beginning is one that the operator published."""
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


class PrefixUses:
    def __init__(self) -> None:
        self._uses: dict[bytes, PrefixUse] = {}

    def note(self, group: bytes, model: str, num_prompt: int, num_cached: int, *, is_public: bool) -> None:
        """Counts a request. O(1) amortised: the rare beginnings are forgotten half by half."""
        use = self._uses.get(group)
        if use is None:
            if len(self._uses) >= 2 * MOST:
                self._uses = dict(self._top(MOST))
            use = self._uses[group] = PrefixUse(model, is_public)
        use.num_requests += 1
        use.num_prompt_tokens += num_prompt
        use.num_cached_tokens += num_cached

    def top(self, number: int) -> list[tuple[str, PrefixUse]]:
        """Returns the beginnings with most requests, as hexadecimal hashes with their counts."""
        return [(group.hex(), use) for group, use in self._top(number)]

    def _top(self, number: int) -> list[tuple[bytes, PrefixUse]]:
        return heapq.nlargest(number, self._uses.items(), key=lambda item: item[1].num_requests)
