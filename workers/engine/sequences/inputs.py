"""The inputs of an attempt that wants vectors or scores: which part of the prompt each one is, and how many have begun.
The module is pure.

Each input runs as a separate sequence. Only `MAX_OPEN` of them wait or run at a time: a request of 2,048 inputs then
takes no more of the queue, and of its tenant's turn, than a few requests do.
"""

from __future__ import annotations

from array import array
from itertools import accumulate

from workers.engine.values.abilities import Abilities
from workers.engine.values.probe import Pooled
from workers.engine.values.record import InputsAccount
from workers.protocol.messages import PoolingParams

MAX_OPEN = 64


class Inputs:
    def __init__(self, params: PoolingParams, prompt: array[int], abilities: Abilities) -> None:
        self._params = params
        self._prompt = prompt
        self._ends = list(accumulate(params.lengths))
        self.reuses_kv = abilities.reuses_kv
        self.is_whole = abilities.is_whole
        self.account = InputsAccount(len(prompt))
        self.num_begun = 0
        self.num_ended = 0

    @property
    def number(self) -> int:
        return len(self._params.lengths)

    @property
    def all_ended(self) -> bool:
        return self.num_ended == self.number

    def tokens(self, index: int) -> array[int]:
        end = self._ends[index]
        return self._prompt[end - self._params.lengths[index] : end]

    def probe(self, index: int, before: object) -> Pooled:
        """Returns what a row of the input asks for. `before` is the answer to the row before it."""
        params = self._params
        segment = params.segments[index] if params.segments else 0
        return Pooled(params.lengths[index], before, params.dimensions, segment, params.labels)
