"""Tokens that a request may not draw: the ends of bad words, and every token outside the request's list of allowed
ones. The module knows no torch.

It knows token ids and outputs, but no logits. A mask like a grammar's says what may be drawn at all, and a list says
what may not be drawn after an output. As in vLLM's `bad_words`, the last token of a word of several tokens is banned
where the ones before it were just drawn; the prompt does not count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Sequence

from workers.engine.values.sampling_params import end_tokens
from workers.protocol.messages import SamplingParams

MAX_KNOWN = 64
"""Number of lists of banned tokens that a request keeps for later draws."""


class Bans:
    """Bans of one request, for all its choices. Raises `ValueError` where nothing could ever be drawn."""

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        """Prepares the bans. All ids are of the vocabulary, and no word is empty."""
        words = params.bad_words
        self._single = tuple(sorted({word[0] for word in words if len(word) == 1}))
        self._longer = _Beginnings([word for word in words if len(word) > 1])
        self._known: dict[tuple[int, bool], Sequence[int]] = {}
        """Banned tokens, by the longest beginning of a word that was drawn and whether ends are banned as well."""
        self._ends = frozenset(end_tokens(params, eos_token_ids))
        self._min_tokens = params.min_tokens
        self._allowed = sorted(set(params.allowed_token_ids)) or range(vocab_size)
        self.mask = _mask(params.allowed_token_ids, vocab_size)
        """Mask of the tokens that may be drawn (as in grammars/grammar.py). The value is None if any token may."""
        if not self._leaves(self._single, 0):
            raise ValueError("nothing may be drawn")

    @property
    def needs_last(self) -> bool:
        """Whether the bans of a draw depend on the tokens right before it."""
        return len(self._longer) > 0

    def behind(self, output: Sequence[int]) -> Sequence[int]:
        """Returns the tokens that may not be drawn next. The bans of longer words are dropped where they would leave
        nothing to draw."""
        place = self._longer.find(output)
        if place < 0:
            return self._single
        key = place, len(output) < self._min_tokens
        if key not in self._known:
            if len(self._known) == MAX_KNOWN:
                self._known.clear()
            banned = self._longer.lasts(place).union(self._single)
            self._known[key] = sorted(banned) if self._leaves(banned, len(output)) else self._single
        return self._known[key]

    def _leaves(self, banned: Container[int], num_output: int) -> bool:
        ends = self._ends if num_output < self._min_tokens else frozenset[int]()
        return any(token not in banned and token not in ends for token in self._allowed)


class _Beginnings:
    """The words of several tokens without their last ones, each read backwards, in order. Of all beginnings that end an
    output one search finds the longest, and each leads to the next shorter one: whatever lies in the order between a
    beginning and an output that has it begins with it, too."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        lasts: dict[tuple[int, ...], set[int]] = {}
        for word in words:
            lasts.setdefault(tuple(word[-2::-1]), set()).add(word[-1])
        self._beginnings = sorted(lasts)
        self._lasts = [lasts[beginning] for beginning in self._beginnings]
        self._longest = max(map(len, self._beginnings), default=0)
        self._shorter: list[int] = []
        """The place of the longest other beginning with which it begins, for each one. The value is -1 if there is
        none."""
        above: list[int] = []
        for place, beginning in enumerate(self._beginnings):
            while above and not _begins(beginning, self._beginnings[above[-1]]):
                above.pop()
            self._shorter.append(above[-1] if above else -1)
            above.append(place)

    def __len__(self) -> int:
        return len(self._beginnings)

    def find(self, output: Sequence[int]) -> int:
        """Returns the place of the longest beginning that ends this output, or -1 if none does. It takes time for the
        longest word, not for their number."""
        if not self._beginnings:
            return -1
        recent = tuple(output[: -self._longest - 1 : -1])
        place = bisect_right(self._beginnings, recent) - 1
        if place < 0 or _begins(recent, self._beginnings[place]):
            return place
        pairs = enumerate(zip(recent, self._beginnings[place], strict=False))
        num_equal = next((at for at, (mine, theirs) in pairs if mine != theirs), len(recent))
        while place >= 0 and len(self._beginnings[place]) > num_equal:
            place = self._shorter[place]
        return place

    def lasts(self, place: int) -> set[int]:
        """Returns the last tokens of the words with this beginning, or with a shorter one that ends the same output."""
        found: set[int] = set()
        while place >= 0:
            found |= self._lasts[place]
            place = self._shorter[place]
        return found


def _begins(whole: tuple[int, ...], beginning: tuple[int, ...]) -> bool:
    return whole[: len(beginning)] == beginning


def bans_of(params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> Bans | None:
    """Returns the bans of a request, or None if it bans nothing. Raises `ValueError` where nothing could ever be
    drawn."""
    if not (params.bad_words or params.allowed_token_ids):
        return None
    return Bans(params, eos_token_ids, vocab_size)


def _mask(allowed: Sequence[int], vocab_size: int) -> bytes | None:
    if not allowed:
        return None
    mask = bytearray((vocab_size + 31) // 32 * 4)
    for token in allowed:
        mask[token >> 3] |= 1 << (token & 7)
    return bytes(mask)
