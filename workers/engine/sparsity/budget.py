"""Choice of the blocks of a long sequence that stay in its table: the first, the last, and those between that received
the most attention. It is lossy: dropped blocks are no longer seen. The module is pure.

The method is H2O (arXiv 2306.14048) with the sinks of StreamingLLM (arXiv 2309.17453). It works by blocks instead of
tokens, and keeps the same blocks in every layer, since a block id stands for all of them. The attention that a block
received is measured by a few queries: the last ones of a prompt (as SnapKV has it, arXiv 2404.14469), then one in
`OBSERVE_EVERY` tokens. H2O sums over all queries. Here earlier measurements count less with each further query, because
otherwise early blocks win for being early (docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from workers.engine.sequences.sequence import Attempt, Sequence
from workers.engine.values.probe import DECAY

Policy = Literal["heavy", "recent"]

MIN_BLOCKS = 4
"""Smallest budget: the first block, the one with the most attention, the last full one, and the one that is written
to."""
NUM_SINKS = 1
OBSERVED_TOKENS = 16
OBSERVE_EVERY = 8


def received(before: Seq[float], mass: Seq[float]) -> list[float]:
    """Returns the attention per block of a table that may have grown since the last measurement. `mass` sums to 1 +
    DECAY + DECAY² + ..., with a term for each query. So its sum says how many queries there were, and the number of
    steps in which they came makes no difference."""
    less = 1 - (1 - DECAY) * sum(mass)
    return [less * old + new for old, new in zip_longest(before, mass, fillvalue=0.0)]


@dataclass(frozen=True, slots=True)
class Sparsity:
    policy: Policy
    """Rule for the blocks to keep. With "recent" nothing is measured, and the latest blocks stay."""
    num_blocks: int
    """Largest number of blocks that a sequence holds once its prompt is computed."""
    block_size: int

    def __post_init__(self) -> None:
        assert self.num_blocks >= MIN_BLOCKS

    def applies(self, attempt: Attempt) -> bool:
        """Says whether the attempt may grow beyond the budget. All other attempts run as if there were no budget."""
        return attempt.end_len > self.num_blocks * self.block_size

    def num_observed(self, sequence: Sequence, num_tokens: int, *, is_measured: bool) -> int:
        """Returns how many of the tokens that the sequence computes next, counted from the last, have their attention
        measured. The number depends on positions alone, whatever the chunks are. A cached token is not computed, so it
        measures nothing. `is_measured` says whether anything was measured before."""
        if self.policy == "recent" or not self.applies(sequence.attempt):
            return 0
        end = sequence.num_scheduled + num_tokens
        if sequence.decoding and is_measured:
            return int(end % OBSERVE_EVERY == 0)
        return max(0, min(num_tokens, end - len(sequence.tokens) + OBSERVED_TOKENS))

    def kept(self, mass: Seq[float], num_held: int, number: int) -> list[int]:
        """Returns the rising indices of the `number` of `num_held` blocks that stay. `mass` is the attention that each
        block received, without the blocks at the end that received none. Of blocks with equal attention the latest
        stay."""
        num_recent = (self.num_blocks - NUM_SINKS) // 2
        between = range(NUM_SINKS, num_held - num_recent)
        known = [*mass, *(0.0 for _ in range(num_held - len(mass)))]
        by_mass = sorted(between, key=lambda index: (known[index], index), reverse=True)
        heavy = sorted(by_mass[: number - NUM_SINKS - num_recent])
        return [*range(NUM_SINKS), *heavy, *range(num_held - num_recent, num_held)]
