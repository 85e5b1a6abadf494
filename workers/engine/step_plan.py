"""What a plan says, and the bounds it keeps to: values that the scheduler's parts and the step loop hand on. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from workers.engine.sequence import Sequence

RECOVERY_STEPS = 64
"""A budget that was cut grows to twice itself after so many steps that ran."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_batch_tokens: int
    max_running: int
    max_len: int
    """Tokens of prompt and output together: what model and pool can hold."""
    lease_wait_s: float = 2.0
    lease_silence_s: float = 15.0

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
    ahead: bool = False
    """A step is in flight. Nobody is preempted then: what it gives back may be enough."""
    holds_next: bool = False
    """The next step cannot be planned before this one is collected: its rows fork or carry prompt logprobs, or somebody
    has to lose blocks."""
    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    proposals: dict[Sequence, tuple[int, ...]] = field(default_factory=dict)
    """Of decode rows with n proposals, which compute and draw 1 + n tokens."""
    num_preempted: int = 0
    num_cached_tokens: int = 0


class TokenBudget:
    """Tokens of a step: the limit, or less for a while after the device ran out of memory."""

    def __init__(self, limit: int) -> None:
        self.num_tokens = limit
        self._limit = limit
        self._num_steps = 0

    def cut(self, num_tokens: int) -> None:
        """A step of `num_tokens` was too large."""
        self.num_tokens = max(1, min(self.num_tokens, num_tokens // 2))
        self._num_steps = 0

    def step_ran(self) -> None:
        if self.num_tokens == self._limit:
            return
        self._num_steps += 1
        if self._num_steps == RECOVERY_STEPS:
            self._num_steps = 0
            self.num_tokens = min(self._limit, 2 * self.num_tokens)
