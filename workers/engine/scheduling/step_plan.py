"""Content of a plan, and the bounds it keeps: values that the scheduler's parts and the step loop exchange. The module
is pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.engine.sequences.sequence import Sequence
from workers.engine.values.token_tree import Proposal

REST_PART = 8
"""The rest of a prompt is not left for another step if it is at most a 1 / `REST_PART` part of what the step takes of
the prompt."""

FILL_PART = 4
"""Batch gets a 1 / `FILL_PART` part of the tokens that are left of a step that is kept short. Prompts get such a part
of a short step that streams fill."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_batch_tokens: int
    max_running: int
    max_len: int
    """Largest number of tokens of prompt and output together, which the model and the pool can hold."""
    lease_wait_s: float = 2.0
    lease_silence_s: float = 15.0
    ttft_s: float = 60.0
    """Longest wait for the first token that the interactive tier aims at, in seconds. A request that would wait longer
    in the queue is refused."""
    token_gap_s: float = 0.05
    """Time between two tokens that the interactive tier aims at, in seconds. A step should take no longer."""

    def __post_init__(self) -> None:
        if self.max_running > self.max_batch_tokens:
            raise ValueError("max_batch_tokens must be at least max_running: each decode takes one")


class Work(NamedTuple):
    sequence: Sequence
    num_tokens: int
    num_draws: int


@dataclass(slots=True)
class StepPlan:
    step: int
    now: float
    budget: int
    """Number of tokens not yet dealt out."""
    slack: int = 0
    """Number of tokens that the step may have beyond its budget, because the device's memory takes more than the
    budget."""
    ahead: bool = False
    """Whether a step is in flight. Nobody is preempted then, because the blocks that it gives back may be enough."""
    holds_next: bool = False
    """Whether the next step cannot be planned before this one is collected. The reason is that its rows fork or carry
    prompt logprobs, or that a sequence has to lose blocks."""
    takes: Callable[[Sequence], bool] | None = None
    """Test for the sequences that may take part in this step (apart.py). Nothing is planned for the others. The value
    is None if all may."""
    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (source, target) of blocks, in the order in which they are to be copied: a source that its sequences gave up
    may be a later target."""
    proposals: dict[Sequence, Proposal] = field(default_factory=dict)
    """Proposals of decode rows. A row with n nodes computes and draws 1 + n tokens."""
    num_preempted: int = 0
    num_cached_tokens: int = 0
    short: bool = False
    """Whether the step is kept short already. Then `keep_short`, `fill_up` and `expect_arrival` change nothing."""
    num_tokens: int = 0
    num_kv_tokens: int = 0
    """Number of KV tokens that attention reads: the positions before each row's own."""

    def excludes(self, sequence: Sequence) -> bool:
        return self.takes is not None and not self.takes(sequence)

    def has_row(self, sequence: Sequence) -> bool:
        return any(work.sequence is sequence for work in self.work)

    def keep_short(self) -> None:
        """Gives batch only a part of the tokens that are left over, because an interactive request may come while this
        step runs."""
        if not self.short:
            self.short, self.slack = True, 0
            self.budget = -(-self.budget // FILL_PART)

    def stretch(self, num_tokens: int, num_left: int) -> int:
        """Returns how many tokens a step takes of a prompt that has `num_left` tokens and a share of `num_tokens`. It
        takes all of them if another step would be needed for a small rest."""
        rest = num_left - num_tokens
        if rest <= 0:
            return num_left
        if rest > min(num_tokens // REST_PART, self.slack):
            return num_tokens
        self.slack -= rest
        self.budget += rest
        return num_left

    def fill_up(self, num_tokens: int) -> None:
        """Limits the step to `num_tokens`, or to those it has already, because a tenant that asks seldom waits for its
        end."""
        self._bound(num_tokens, 0)

    def expect_arrival(self, num_tokens: int) -> None:
        """Limits the step to `num_tokens`, because a tenant that asks seldom may come before it ends. If streams take
        all of them, prompts are left a part all the same."""
        self._bound(num_tokens, -(-num_tokens // FILL_PART))

    def _bound(self, num_tokens: int, least: int) -> None:
        if not self.short:
            self.short, self.slack = True, 0
            dealt = sum(work.num_tokens for work in self.work)
            self.budget = min(self.budget, max(least, num_tokens - dealt))
