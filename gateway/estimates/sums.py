"""The sums over the counted lines of a batch, and what they say of all its lines. The module is pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from accounting.batches.past_batches import PastBatches
from accounting.prices import pricing
from accounting.values.types import Rates, Usage
from gateway.generation.engine_request import EngineRequest

GOLDEN = 0.6180339887498949
"""The golden ratio's part below 1: its multiples lie evenly in every beginning of their row."""


def spread(num_lines: int) -> Iterator[int]:
    """Yields each of the indexes 0 to `num_lines` - 1 once, so that every beginning is an even sample of them."""
    modulus = num_lines
    while math.gcd(round(modulus * GOLDEN), modulus) > 1:
        modulus += 1
    stride = round(modulus * GOLDEN)
    for step in range(modulus):
        if (index := step * stride % modulus) < num_lines:
            yield index


@dataclass
class Counted:
    """The sums over the lines that were counted. A line that the gateway would refuse costs nothing."""

    num_lines: int = 0
    num_bytes: int = 0
    num_refused: int = 0
    refusals: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    """The bounds of all answers."""
    least: int = 0
    most: int = 0
    predicted_tokens: int = 0
    """The tokens of the lines as the limit on waiting prompt tokens counts them."""

    def add(self, orders: list[EngineRequest], rates: Rates) -> None:
        cheapest = min(rates.cache_read, rates.cache_write, rates.uncached)
        for order in orders:
            output = order.max_tokens * order.num_choices
            num_prompt = len(order.prompt)
            self.prompt_tokens += num_prompt
            self.output_tokens += output
            self.least += pricing.charge(Usage(uncached=num_prompt), Rates(0, 0, cheapest, 0)).total
            self.most += pricing.prompt_reservation(num_prompt, rates) + pricing.lease_cost(output, rates)


@dataclass(frozen=True)
class Whole:
    """The same sums for all good lines: exact, or in proportion to the lines that were counted."""

    num_lines: int
    prompt_tokens: int
    output_tokens: int
    least: int
    most: int
    predicted_tokens: int

    @classmethod
    def of(cls, counted: Counted, num_lines: int, num_bytes: int) -> Whole:
        """Prompts grow with the bytes of their lines, answers with the number of lines."""

        def by_bytes(value: int) -> int:
            return value if counted.num_bytes == num_bytes else round(value * num_bytes / max(1, counted.num_bytes))

        def by_lines(value: int) -> int:
            return value if counted.num_lines == num_lines else round(value * num_lines / max(1, counted.num_lines))

        return cls(
            by_lines(counted.num_lines - counted.num_refused),
            by_bytes(counted.prompt_tokens),
            by_lines(counted.output_tokens),
            by_bytes(counted.least),
            max(by_bytes(counted.most), by_lines(counted.most)),
            by_bytes(counted.predicted_tokens),
        )


def turns_of_others(tenant: str, own_tokens: int, backlogs: Mapping[str, int], weights: Mapping[str, float]) -> int:
    """Returns the tokens of other tenants that run before the tenant's own tokens are done. While both wait, each gets its
    share by weight, as jobs processes give turns: of each other tenant no more than that share comes first.
    """
    others = ((other, backlog) for other, backlog in backlogs.items() if other != tenant)
    return sum(min(backlog, round(own_tokens * weights[other] / weights[tenant])) for other, backlog in others)


@dataclass(frozen=True)
class Likely:
    """The use that past batches make likely."""

    usage: Usage
    charge: int
    running_s: int


def likely(whole: Whole, past: PastBatches, rates: Rates) -> Likely | None:
    """Returns what the lines would use if they were as those of past batches; None without such lines."""
    if not past.num_lines or not past.usage.prompt:
        return None
    before, prompt = past.usage, whole.prompt_tokens
    cache_read = prompt * before.cache_read // before.prompt
    cache_write = prompt * before.cache_write // before.prompt
    output = min(whole.output_tokens, round(whole.num_lines * before.output / past.num_lines))
    usage = Usage(cache_read, cache_write, prompt - cache_read - cache_write, output)
    speed = before.total / past.running_s
    return Likely(usage, pricing.sum_charge(usage, rates).total, round(usage.total / speed))
