"""Tokens that a request may not draw: the ends of bad words, and every token outside the request's list of allowed
ones. The module knows no torch.

It knows token ids and outputs, but no logits. A mask like a grammar's says what may be drawn at all, and a list says
what may not be drawn after an output. As in vLLM's `bad_words`, the last token of a word of several tokens is banned
where the ones before it were just drawn; the prompt does not count.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from workers.engine.values.sampling_params import end_tokens
from workers.protocol.messages import SamplingParams


class Bans:
    """Bans of one request, for all its choices. Raises `ValueError` where nothing could ever be drawn."""

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], vocab_size: int) -> None:
        """Prepares the bans. All ids are of the vocabulary, and no word is empty."""
        words = params.bad_words
        self._single = tuple(sorted({word[0] for word in words if len(word) == 1}))
        self._longer: dict[int, list[tuple[list[int], int]]] = {}
        """Words of several tokens, keyed by their last but one token. Each value is all tokens but the last one, and
        the last one."""
        for word in words:
            if len(word) > 1:
                self._longer.setdefault(word[-2], []).append((list(word[:-1]), word[-1]))
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
        return bool(self._longer)

    def behind(self, output: Sequence[int]) -> Sequence[int]:
        """Returns the tokens that may not be drawn next. The bans of longer words are dropped where they would leave
        nothing to draw."""
        if not (output and self._longer):
            return self._single
        ending = {last for before, last in self._longer.get(output[-1], ()) if list(output[-len(before) :]) == before}
        if not ending:
            return self._single
        banned = ending.union(self._single)
        return sorted(banned) if self._leaves(banned, len(output)) else self._single

    def _leaves(self, banned: Container[int], num_output: int) -> bool:
        ends = self._ends if num_output < self._min_tokens else frozenset[int]()
        return any(token not in banned and token not in ends for token in self._allowed)


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
