"""How long whoever comes now would wait until its prompt can begin. Pure; knows numbers, no tenants and no clock.

What stands before an arrival is so many prompt tokens, in so many sequences. They take so many steps; which is to be
found out twice, and the slower one counts. By tokens: a step has its budget, and streams take a part of it. By places:
where all are taken, one is free when an answer ends, and answers are as long as they were of late; where a step has no
time for all streams, a token of each costs several steps. A step costs what steps were seen to cost (`pace.StepTime`):
fixed costs, the rows of its streams, the KV they read; and each prompt token is paid for once. How many tokens small
steps bring about in a second says nothing here: that is their fixed costs.

Nothing is foretold until some steps were seen since the worker last rested. What steps took under another load would
otherwise refuse those whose steps would show what holds now.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.engine.queueing.pace import MIN_STEPS, TokenBudget

FLOOR_RATE = 1000.0
"""Prompt tokens per second that a worker is trusted with, until a step of full size was seen of late: what a small one
takes says little about it, and a wrong refusal is worse than a wait."""

ANSWER_SHARE = 0.05
"""Of the last answer, in the mean length of answers."""


@dataclass(frozen=True, slots=True)
class Queued:
    """What waits, of a tenant or before an arrival."""

    num_tokens: float = 0
    """Uncached ones of prompts."""
    num_sequences: float = 0

    def plus(self, other: Queued, part: float = 1.0) -> Queued:
        """Both, or of the other one a part between 0 and 1."""
        part = min(1.0, max(0.0, part))
        return Queued(self.num_tokens + part * other.num_tokens, self.num_sequences + part * other.num_sequences)


@dataclass(frozen=True, slots=True)
class Load:
    """What the worker does now."""

    num_running: int = 0
    """Sequences."""
    num_prefill_tokens: int = 0
    """Of their prompts, not computed yet."""
    num_places: int = 1
    """As many may run."""
    num_kv_tokens: int = 0
    """That a step reads."""


class Forecast:
    def __init__(self, budget: TokenBudget) -> None:
        self._budget = budget
        self._answer = 0.0

    @property
    def per_second(self) -> float:
        """Prompt tokens in steps of full size that carry nothing else; 0: nothing is known."""
        if self._budget.step_time.num_steps < MIN_STEPS:
            return 0.0
        step, step_s, token_s = self._full_step(0)
        return step / (step_s + step * token_s) if step_s + token_s > 0 else 0.0

    def answered(self, num_tokens: int) -> None:
        """A sequence that ran gave up its place after so many tokens."""
        share = ANSWER_SHARE if self._answer else 1.0
        self._answer += share * (num_tokens - self._answer)

    def wait_s(self, ahead: Queued, load: Load) -> float:
        """Until those have begun that stand before an arrival; 0 while nothing is known. O(1)."""
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
        """Of a step's tokens, those that streams leave: they take as many as run, but in the long run no more than
        whoever begins will take, for an answer of the usual length."""
        if num_tokens <= 0:
            return float(step)
        part = num_tokens / (num_tokens + num_sequences * self._answer)
        return max(step - num_rows, step * part)

    def _full_step(self, num_kv_tokens: int) -> tuple[int, float, float]:
        """Its tokens, seconds that it takes without them, seconds for each of them."""
        num_tokens = self._budget.hurried(num_kv_tokens)
        fixed_s, token_s, kv_s = self._budget.step_time.fit
        if not self._budget.step_time.has_seen(num_tokens):
            token_s = min(token_s, 1 / FLOOR_RATE)
        return num_tokens, fixed_s + kv_s * num_kv_tokens, token_s
