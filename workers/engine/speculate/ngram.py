"""Prompt lookup: it proposes the tokens that followed when the last tokens occurred before. The module knows the tokens
of one sequence and nothing else.

The source is prompt lookup decoding (A. Saxena, 2023), as in the n-gram proposers of vLLM and transformers; the data
structure is our own. Every index is linked to the one before it that ends with the same two tokens, so a token costs
one dictionary access and a lookup at most `MAX_PLACES` comparisons, however long the text is.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

LEAST_MATCH = 2
LONGEST_MATCH = 4
MAX_PLACES = 16
"""Largest number of earlier indices that a lookup compares, latest first."""
PLAN_TOKENS = 4096
"""Tokens that all indices take in for one plan, about 12 ms. All tenants wait for that."""
LEAST_TOKENS = 16
"""Tokens that each index takes in even so: what was drawn since the plan before."""


class Room:
    """The tokens that indices may take in before the next plan. Each gets half of what is left, so that a long text
    leaves something to the others."""

    def __init__(self) -> None:
        self.refill()

    def refill(self) -> None:
        self._left = PLAN_TOKENS

    def take(self, wanted: int) -> int:
        taken = min(wanted, max(self._left // 2, LEAST_TOKENS))
        self._left -= taken
        return taken


class NgramIndex:
    __slots__ = ("_before", "_last", "_room")

    def __init__(self, room: Room | None = None) -> None:
        self._room = room
        self._last: dict[int, int] = {}
        """Map from two tokens to the last index at which the second one stands."""
        self._before = array("i")
        """Array from an index to the index before it with the same two tokens. The value is -1 if there is none."""

    def extend(self, tokens: array[int]) -> None:
        """Adds the new tokens, as many as there is room for. `tokens` is the list of the call before, grown at its
        end."""
        last, before = self._last, self._before
        first = len(before)
        num_new = len(tokens) - first
        if not num_new:
            return
        if self._room is not None:
            num_new = self._room.take(num_new)
        previous = tokens[first - 1] if first else -1
        for place in range(first, first + num_new):
            token = tokens[place]
            key = (previous << 32) | token
            before.append(last.get(key, -1))
            last[key] = place
            previous = token

    def places(self, pair: tuple[int, int]) -> Iterator[int]:
        """Yields the indices at which these two tokens stand (the second one's index), latest first, at most
        `MAX_PLACES`."""
        place = self._last.get((pair[0] << 32) | pair[1], -1)
        for _ in range(MAX_PLACES):
            if place < 0:
                return
            yield place
            place = self._before[place]

    def find(self, tokens: array[int]) -> Match | None:
        """Returns where the end of the tokens occurred before. It is called after `extend`, and finds nothing until
        that has added all. The longest match wins, up to `LONGEST_MATCH` tokens, and of equal ones the latest."""
        end = len(tokens) - 1
        if end < 1 or len(self._before) <= end:
            return None
        place, found = self._before[end], None
        for _ in range(MAX_PLACES):
            if place < 0:
                break
            length = match_length(tokens, place, tokens, LONGEST_MATCH)
            if found is None or length > found.length:
                found = Match(place + 1, length)
                if length == LONGEST_MATCH:
                    break
            place = self._before[place]
        return found


class Match(NamedTuple):
    place: int
    """Index of the token that follows the match."""
    length: int


def match_length(text: array[int], place: int, tokens: array[int], most: int) -> int:
    """Returns how many tokens that end at index `place` of the text equal those that end `tokens`, at most `most`. Two
    of them are known to be equal."""
    length, end = LEAST_MATCH, len(tokens) - 1
    most = min(most, place + 1, end + 1)
    while length < most and text[place - length] == tokens[end - length]:
        length += 1
    return length


def continuation(tokens: array[int], first: int, num_tokens: int) -> array[int]:
    """Returns `num_tokens` tokens from index `first` on. Where they reach the end of the text, it goes on as if it
    repeated itself."""
    found = tokens[first : first + num_tokens]
    period = len(tokens) - first
    while len(found) < num_tokens:
        found.append(found[len(found) - period])
    return found
