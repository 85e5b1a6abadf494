"""Our own count compared with the provider's statement: what is billed, and the name of a difference. The module is
pure.

The tenant is billed what the provider states, within what we can have seen: never more than the highest number of tokens
that the bytes can be, and never less than the lowest. What is left is drift, which has a name and is the operator's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from accounting.values.types import Usage
from gateway.upstreams.wires.values import Counter, Interval, Stated

Drift = Literal["", "no_usage", "usage_over", "usage_under", "cut"]
"""The reason why the provider's statement and the bill differ; empty where they agree. `cut`: we ended the stream, and the provider
states nothing.
"""

BYTES_PER_TOKEN = 4
"""The bytes of a token of a usual text. It is an estimate, used where neither a statement nor a tokenizer is there."""
MOST_BYTES_PER_TOKEN = 32
"""No usual tokenizer makes longer tokens of a usual text."""
PER_CALL, PER_CHOICE = 32, 16
"""Tokens without text around a tool call, and around an answer."""
LONG_BYTES = 2048
"""The longest text that is counted on the loop; it takes less than a millisecond."""


def likely(num_bytes: int) -> int:
    return -(-num_bytes // BYTES_PER_TOKEN)


def of_bytes(num_bytes: int, overhead: int) -> Interval:
    """Returns the tokens that a text of that many bytes can have, plus those that have no text."""
    return Interval(num_bytes // MOST_BYTES_PER_TOKEN, likely(num_bytes), num_bytes + overhead)


def of_count(counted: int, overhead: int) -> Interval:
    """Returns the same for a text that was counted. Templates and tool forms differ by some tokens."""
    slack = 4 + counted // 50
    return Interval(max(0, counted - slack), counted, counted + slack + overhead)


class Seen:
    """The part of an answer that has been seen, counted as it comes."""

    def __init__(self, num_choices: int, count: Counter | None) -> None:
        self._count = count
        self._texts: list[str] = []
        self._num_choices = num_choices
        self._num_calls = 0
        self._num_bytes = 0
        self._num_counted = 0
        self._num_whole: int | None = None
        """The count of the whole text so far; None if it is not known."""

    def add(self, text: str, num_calls: int = 0) -> None:
        self._num_bytes += len(text.encode(errors="surrogatepass"))
        self._num_calls += num_calls
        if self._count is not None and text:
            self._texts.append(text)
            self._num_counted += self._count(text)
            self._num_whole = None

    @property
    def num_tokens(self) -> int:
        """The output so far, for the lease."""
        return likely(self._num_bytes) if self._count is None else self._num_counted

    @property
    def num_certain(self) -> int:
        """The number of tokens that the text has at least."""
        if self._count is None:
            return self._num_bytes // MOST_BYTES_PER_TOKEN
        return self._num_counted * 9 // 10  # chunks cut tokens into more of them

    @property
    def is_long(self) -> bool:
        """Says whether the count of the whole text takes long. It is done in a thread then, by `count_whole`."""
        return self._count is not None and self._num_bytes > LONG_BYTES

    def count_whole(self) -> int:
        """Counts the text as one, because chunks cut tokens into more of them. It is counted once."""
        if self._num_whole is None:
            self._num_whole = 0 if self._count is None else self._count("".join(self._texts))
        return self._num_whole

    @property
    def interval(self) -> Interval:
        overhead = PER_CALL * self._num_calls + PER_CHOICE * self._num_choices
        if self._count is None:
            return of_bytes(self._num_bytes, overhead)
        return of_count(min(self._num_counted, self.count_whole()), overhead)


@dataclass(frozen=True)
class Judged:
    """The usage that is billed, and why it differs from what the provider states."""

    usage: Usage
    drift: Drift = ""


def judge(stated: Stated | None, prompt: Interval, output: Interval, bound: int, hides_reasoning: bool) -> Judged:
    """Judges the statement of a whole answer. `bound` is the output that was leased: no more is ever billed."""
    if stated is None:
        return Judged(Usage(uncached=prompt.best, output=min(output.best, bound)), "no_usage")
    highest = min(bound, output.high + (stated.reasoning if hides_reasoning else 0))
    num_prompt = _within(stated.usage.prompt, prompt.low, prompt.high)
    num_output = _within(stated.usage.output, min(output.low, highest), highest)
    usage = _of_prompt(stated.usage, num_prompt, num_output)
    if stated.usage.prompt > num_prompt or stated.usage.output > num_output:
        return Judged(usage, "usage_over")
    return Judged(usage, "usage_under" if usage != stated.usage else "")


def judge_cut(so_far: Stated | None, prompt: Interval, received: int, bound: int) -> Judged:
    """Judges an answer that we ended ourselves. The output is what was received; the prompt is the provider's, if it
    has stated it already.
    """
    num_output = min(received, bound)
    if so_far is None or not so_far.usage.prompt:
        return Judged(Usage(uncached=prompt.best, output=num_output), "cut")
    num_prompt = _within(so_far.usage.prompt, prompt.low, prompt.high)
    return Judged(_of_prompt(so_far.usage, num_prompt, num_output), "cut")


def _within(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))


def _of_prompt(stated: Usage, num_prompt: int, num_output: int) -> Usage:
    read = min(stated.cache_read, num_prompt)
    write = min(stated.cache_write, num_prompt - read)
    return Usage(read, write, num_prompt - read - write, num_output)
