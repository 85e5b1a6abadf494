"""What a plan says, and the bounds it keeps to: values that the scheduler's parts and the step loop hand on. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from workers.engine.sequence import Sequence
from workers.engine.token_tree import Proposal

FILL_PART = 4
"""Of the budget that is left, one in so many tokens is dealt out in a step that is kept short."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_batch_tokens: int
    max_running: int
    max_len: int
    """Tokens of prompt and output together: what model and pool can hold."""
    lease_wait_s: float = 2.0
    lease_silence_s: float = 15.0
    ttft_s: float = 10.0
    """Target of the interactive tier to the first token: who would wait longer in the queue is refused."""
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
    ahead: bool = False
    """A step is in flight. Nobody is preempted then: what it gives back may be enough."""
    holds_next: bool = False
    """The next step cannot be planned before this one is collected: its rows fork or carry prompt logprobs, or somebody
    has to lose blocks."""
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

    def keep_short(self) -> None:
        """Somebody who asks seldom, or before batch, waits for the end of this step: of what is left over, a part."""
        if not self.short:
            self.short = True
            self.budget = -(-self.budget // FILL_PART)

    def expect_arrival(self, num_tokens: int) -> None:
        """Nobody waits for the end of the step yet, but somebody who asks seldom may come before it."""
        if not self.short:
            self.short = True
            self.budget = min(self.budget, num_tokens)
