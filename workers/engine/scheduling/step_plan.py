"""What a plan says, and the bounds it keeps to: values that the scheduler's parts and the step loop hand on. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from workers.engine.sequences.sequence import Sequence
from workers.engine.values.token_tree import Proposal

REST_PART = 8
"""A rest of a prompt that is one in so many of what a step takes of it is not left for another step."""

FILL_PART = 4
"""Batch gets one in so many tokens of what is left of a step that is kept short; prompts get it of a short step that
streams fill."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_batch_tokens: int
    max_running: int
    max_len: int
    """Tokens of prompt and output together: what model and pool can hold."""
    lease_wait_s: float = 2.0
    lease_silence_s: float = 15.0
    ttft_s: float = 60.0
    """Target of the interactive tier: who would wait longer in the queue is refused."""
    token_gap_s: float = 0.05
    """Target of the interactive tier between two tokens: what a step should take at most."""

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
    """Tokens not yet dealt out."""
    slack: int = 0
    """Tokens that the step may have beyond its budget, which is less than the device's memory takes."""
    ahead: bool = False
    """A step is in flight. Nobody is preempted then: what it gives back may be enough."""
    holds_next: bool = False
    """The next step cannot be planned before this one is collected: its rows fork or carry prompt logprobs, or somebody
    has to lose blocks."""
    takes: Callable[[Sequence], bool] | None = None
    """Whose step it is, where not everybody's: of who may not take part (apart.py) nothing is planned."""
    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    proposals: dict[Sequence, Proposal] = field(default_factory=dict)
    """Of decode rows with n nodes, which compute and draw 1 + n tokens."""
    num_preempted: int = 0
    num_cached_tokens: int = 0
    short: bool = False
    """See `keep_short`."""
    num_tokens: int = 0
    num_kv_tokens: int = 0
    """Read by attention: positions before each row's own."""

    def excludes(self, sequence: Sequence) -> bool:
        return self.takes is not None and not self.takes(sequence)

    def keep_short(self) -> None:
        """Somebody may come before batch while this step runs: of what is left over, a part."""
        if not self.short:
            self.short, self.slack = True, 0
            self.budget = -(-self.budget // FILL_PART)

    def stretch(self, num_tokens: int, num_left: int) -> int:
        """What a step takes of a prompt with `num_left` tokens that has a share of `num_tokens`: all of it, if another
        step would be paid for a small rest."""
        rest = num_left - num_tokens
        if rest <= 0:
            return num_left
        if rest > min(num_tokens // REST_PART, self.slack):
            return num_tokens
        self.slack -= rest
        self.budget += rest
        return num_left

    def fill_up(self, num_tokens: int) -> None:
        """Somebody who asks seldom waits for the end of this step: it has so many tokens, or what it has already."""
        self._bound(num_tokens, 0)

    def expect_arrival(self, num_tokens: int) -> None:
        """Nobody waits for the end of the step yet, but somebody who asks seldom may come before it: it has so many
        tokens. Streams that take them all leave prompts a part all the same."""
        self._bound(num_tokens, -(-num_tokens // FILL_PART))

    def _bound(self, num_tokens: int, least: int) -> None:
        if not self.short:
            self.short, self.slack = True, 0
            dealt = sum(work.num_tokens for work in self.work)
            self.budget = min(self.budget, max(least, num_tokens - dealt))
