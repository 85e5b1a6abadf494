"""Which blocks of a long sequence stay in its table: the first, the last, and of those between the ones that were looked
at most. Lossy: what goes is no longer seen. Pure.

H2O (arXiv 2306.14048) with the sinks of StreamingLLM (arXiv 2309.17453), by blocks instead of tokens, and the same blocks
in every layer, since a block id stands for all of them. How much attention a block received is measured by a few
queries: the last ones of a prompt (as SnapKV has it, arXiv 2404.14469), then one in `OBSERVE_EVERY` tokens. H2O sums
over all queries; here what was seen before counts less with each further one, or what stands early wins for being early
(docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

from workers.engine.sequences.sequence import Attempt, Sequence
from workers.engine.values.plan import DECAY

Policy = Literal["heavy", "recent"]

MIN_BLOCKS = 4
"""The first, the one looked at most, the last full one, and the one that is written to."""
NUM_SINKS = 1
OBSERVED_TOKENS = 16
OBSERVE_EVERY = 8


def received(before: Seq[float], mass: Seq[float]) -> list[float]:
    """Attention per block, of a table that may have grown since. `mass` is in all 1 + DECAY + DECAY² + ..., a term for
    each query: so it says how many there were, and it is all the same in how many steps they came."""
    less = 1 - (1 - DECAY) * sum(mass)
    return [less * old + new for old, new in zip_longest(before, mass, fillvalue=0.0)]


@dataclass(frozen=True, slots=True)
class Sparsity:
    policy: Policy
    """recent: nothing is measured, the latest blocks stay."""
    num_blocks: int
    """What a sequence holds at most once its prompt is computed."""
    block_size: int

    def __post_init__(self) -> None:
        assert self.num_blocks >= MIN_BLOCKS

    def applies(self, attempt: Attempt) -> bool:
        """Whether it may grow beyond the budget: all others run as if there were none."""
        return attempt.end_len > self.num_blocks * self.block_size

    def num_observed(self, sequence: Sequence, num_tokens: int) -> int:
        """Of the tokens it computes next, the last ones, whose attention is to be measured. By position alone, whatever
        the chunks are; but what is cached is not computed, and measures nothing."""
        if self.policy == "recent" or not self.applies(sequence.attempt):
            return 0
        end = sequence.num_scheduled + num_tokens
        if sequence.decoding and sequence.mass:
            return int(end % OBSERVE_EVERY == 0)
        return max(0, min(num_tokens, end - len(sequence.tokens) + OBSERVED_TOKENS))

    def kept(self, mass: Seq[float], num_held: int, number: int) -> list[int]:
        """Indices of the `number` of `num_held` blocks that stay, rising. `mass`: attention that each received, without
        those at the end that received none. Among equals the latest stay."""
        num_recent = (self.num_blocks - NUM_SINKS) // 2
        between = range(NUM_SINKS, num_held - num_recent)
        known = [*mass, *(0.0 for _ in range(num_held - len(mass)))]
        by_mass = sorted(between, key=lambda index: (known[index], index), reverse=True)
        heavy = sorted(by_mass[: number - NUM_SINKS - num_recent])
        return [*range(NUM_SINKS), *heavy, *range(num_held - num_recent, num_held)]
