"""Forecast of how long a request that comes now would wait until its prompt can begin. The module is pure: it knows
numbers, no tenants and no clock.

The work ahead of an arrival is a number of prompt tokens in a number of sequences. The steps that they take are
computed in two ways, and the slower one counts. By tokens: a step has its budget, and streams take a part of it. By
running sequences: when the largest number of them runs, one can start only when an answer ends, and answers are assumed
to be as long as recent ones were; where a step has no time for all streams, a token of each costs several steps. A step
costs what steps were seen to cost (`pace.StepTime`): fixed costs, the rows of its streams, the KV they read. Each
prompt token is paid for once. How many tokens small steps compute in a second says nothing here, because most of their
time is fixed costs.

Nothing is forecast until some steps were seen since the worker last rested. Otherwise step times from another load
would refuse requests whose steps would show the present times.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.engine.queueing.pace import MIN_STEPS, TokenBudget

FLOOR_RATE = 1000.0
"""Prompt tokens per second that are assumed at least until a step of full size was seen recently. The time of a small
step says little about a full one, and a wrong refusal is worse than a wait."""

ANSWER_SHARE = 0.05
"""Weight of the last answer in the mean length of answers."""


@dataclass(frozen=True, slots=True)
class Queued:
    """Amount of waiting work, of a tenant or ahead of an arrival."""

    num_tokens: float = 0
    """Number of uncached prompt tokens."""
    num_sequences: float = 0

    def plus(self, other: Queued, part: float = 1.0) -> Queued:
        """Returns the sum of this amount and a part, between 0 and 1, of the other one."""
        part = min(1.0, max(0.0, part))
        return Queued(self.num_tokens + part * other.num_tokens, self.num_sequences + part * other.num_sequences)


@dataclass(frozen=True, slots=True)
class Load:
    """The work that the worker has at the moment."""

    num_running: int = 0
    """Number of running sequences."""
    num_prefill_tokens: int = 0
    """Number of tokens of the running sequences in prefill that are not computed yet."""
    num_places: int = 1
    """Largest number of sequences that may run."""
    num_kv_tokens: int = 0
    """Number of KV tokens that a step reads."""


class Forecast:
    def __init__(self, budget: TokenBudget) -> None:
        self._budget = budget
        self._answer = 0.0

    @property
    def per_second(self) -> float:
        """Prompt tokens per second in steps of full size that carry nothing else. The value is 0 while too few steps
        were seen."""
        if self._budget.step_time.num_steps < MIN_STEPS:
            return 0.0
        step, step_s, token_s = self._full_step(0)
        return step / (step_s + step * token_s) if step_s + token_s > 0 else 0.0

    def answered(self, num_tokens: int) -> None:
        """Records that a sequence stopped running after `num_tokens` output tokens."""
        share = ANSWER_SHARE if self._answer else 1.0
        self._answer += share * (num_tokens - self._answer)

    def wait_s(self, ahead: Queued, load: Load) -> float:
        """Returns the seconds until the work ahead of an arrival has begun. The value is 0 while too few steps were
        seen. O(1)."""
        if self._budget.step_time.num_since_rest < MIN_STEPS:
            return 0.0
        num_tokens = ahead.num_tokens + load.num_prefill_tokens
        step, step_s, token_s = self._full_step(load.num_kv_tokens)
        num_rows = min(load.num_places, load.num_running + ahead.num_sequences)
        for_prompts = self._for_prompts(step, num_rows, num_tokens, ahead.num_sequences)
        num_steps, num_streams = num_tokens / for_prompts, step - for_prompts
        num_excess = max(0.0, load.num_running + ahead.num_sequences + 1 - load.num_places)
        num_turns = num_excess * self._answer / load.num_places
        if num_turns > num_steps:
            num_steps, num_streams = num_turns, num_rows
            step_s *= max(1.0, num_rows / self._budget.num_rows(load.num_kv_tokens / num_rows))
        return num_steps * (step_s + token_s * num_streams) + token_s * num_tokens

    def _for_prompts(self, step: int, num_rows: float, num_tokens: float, num_sequences: float) -> float:
        """Returns how many of a step's tokens streams leave to prompts. The streams take as many as run, but in the
        long run no more than the sequences that begin will take, for an answer of the usual length."""
        if num_tokens <= 0:
            return float(step)
        part = num_tokens / (num_tokens + num_sequences * self._answer)
        return max(step - num_rows, step * part)

    def _full_step(self, num_kv_tokens: int) -> tuple[int, float, float]:
        """Returns the tokens of a full step, the seconds that it takes without them, and the seconds for each of
        them."""
        num_tokens = self._budget.hurried(num_kv_tokens)
        fixed_s, token_s, kv_s = self._budget.step_time.fit
        if not self._budget.step_time.has_seen(num_tokens):
            token_s = min(token_s, 1 / FLOOR_RATE)
        return num_tokens, fixed_s + kv_s * num_kv_tokens, token_s
