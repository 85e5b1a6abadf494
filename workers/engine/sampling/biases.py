"""Biases and bans of draws, in the order in which the op `logits` reads them. They are put in order once for each
request, and again only where other tokens are banned.

It knows draws and the form of `EditTensors.bias_tokens`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from kernels.arguments.draws import NO_TOKEN
from workers.engine.kv.transport import float_bits
from workers.engine.sampling.derived import Derived
from workers.engine.values.plan import SampleSpec
from workers.engine.values.sampling_params import end_tokens
from workers.protocol.messages import SamplingParams


def lacks_tokens(draw: SampleSpec) -> bool:
    """Returns whether the draw comes before `min_tokens`. A token that is not known yet is counted, too."""
    return draw.position - len(draw.prompt) < draw.params.min_tokens


class Biases:
    """The biases of the requests that are here."""

    def __init__(self, eos_token_ids: Sequence[int]) -> None:
        self._eos_token_ids = tuple(eos_token_ids)
        self._requests = Derived[SamplingParams, _Request](lambda params: _Request(params, self._eos_token_ids))

    def table(self, draws: Sequence[SampleSpec]) -> tuple[array[int], array[int], int]:
        """Returns the tokens and the bits of the biases of all draws, line after line, and the length of a line."""
        lines = [self._requests.of(draw.params).line(draw) for draw in draws]
        longest = max(1, *(len(line_tokens) for line_tokens, _ in lines)) if lines else 1
        tokens, values = array("i"), array("i")
        for line_tokens, line_values in lines:
            num_free = longest - len(line_tokens)
            tokens += line_tokens + array("i", [NO_TOKEN]) * num_free
            values += line_values + array("i", [0]) * num_free
        return tokens, values, longest


class _Request:
    """The biases of one request, and the line of its last draw."""

    __slots__ = ("_banned", "_ends", "_ends_banned", "_line", "_own")

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        self._own = sorted(params.logit_bias)
        self._ends = end_tokens(params, eos_token_ids)
        self._banned: Sequence[int] = ()
        self._ends_banned = False
        self._line = _line(self._own)

    def line(self, draw: SampleSpec) -> tuple[array[int], array[int]]:
        """Returns (tokens, bits of their biases) in rising order of tokens; a ban is a bias of -inf."""
        ends_banned = lacks_tokens(draw)
        if draw.banned is not self._banned or ends_banned != self._ends_banned:
            banned = [*draw.banned, *self._ends] if ends_banned else draw.banned
            self._line = _line(sorted([*self._own, *((token, -math.inf) for token in banned)]))
            self._banned, self._ends_banned = draw.banned, ends_banned
        return self._line


def _line(biases: Sequence[tuple[int, float]]) -> tuple[array[int], array[int]]:
    return array("i", [token for token, _ in biases]), float_bits([value for _, value in biases])
