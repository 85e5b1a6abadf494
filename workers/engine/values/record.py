"""Counts that the engine keeps: the parts of a prompt, a step, running sums. The module knows no sequence and no clock.

The law (engine.md section 5) holds over any period in which nothing runs at both ends: sum over attempts of (uncached +
cache_write + recomputed) == sum over steps of num_prefill_tokens, and sum of output == sum of num_output_tokens, and
sum of speculated == sum of (num_proposed - num_accepted).
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from workers.protocol.counts import PromptCounts


class PromptAccount:
    """Account of one prompt. It assigns every position to exactly one of read, written and uncached. A position that is
    computed again is not counted again here. Positions are met in order, and `num_seen` of them have been assigned."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.num_seen = 0
        self.num_read = 0
        self.num_computed = 0
        self._num_written = 0
        self._unwritten: list[tuple[int, int]] = []
        self._closed: PromptCounts | None = None

    @property
    def closed(self) -> bool:
        return self._closed is not None

    def read_until(self, position: int) -> int:
        """Counts the first `position` tokens as found in the cache. Returns how many of them are new to this
        account."""
        num_new = max(0, min(position, self.num_tokens) - self.num_seen)
        self.num_read += num_new
        self.num_seen += num_new
        return num_new

    def compute(self, start: int, end: int) -> int:
        """Counts positions start..end as computed. Returns how many of them were computed for the first time."""
        assert start <= self.num_seen or start >= self.num_tokens, "a hole in the prompt"
        first, last = max(start, self.num_seen), min(end, self.num_tokens)
        if last <= first:
            return 0
        self._unwritten.append((first, last))
        self.num_computed += last - first
        self.num_seen = last
        return last - first

    def insert(self, start: int, end: int) -> None:
        """Counts positions start..end as written: they went into the prefix tree as nodes that this request made."""
        kept: list[tuple[int, int]] = []
        for first, last in self._unwritten:
            low, high = max(first, start), min(last, end)
            if low >= high:
                kept.append((first, last))
                continue
            self._num_written += high - low
            kept += [(a, b) for a, b in ((first, low), (high, last)) if a < b]
        self._unwritten = kept

    def close(self) -> PromptCounts:
        """Ends the prefill and returns its counts, which do not change from now on."""
        if self._closed is None:
            self._closed = self.counts
        return self._closed

    @property
    def counts(self) -> PromptCounts:
        """Tokens read and computed up to now."""
        return self._closed or PromptCounts(
            cache_read=self.num_read, cache_write=self._num_written, uncached=self.num_computed - self._num_written
        )


class InputsAccount:
    """The sum of the accounts of an attempt's inputs, each of which is a prompt."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self.closed = False
        self._open: list[PromptAccount] = []
        self._ended = PromptCounts()
        self._num_ended = 0

    def begin(self, num_tokens: int) -> PromptAccount:
        account = PromptAccount(num_tokens)
        self._open.append(account)
        return account

    def end(self, account: PromptAccount) -> None:
        """Adds the counts of an input that is finished."""
        self._open.remove(account)
        self._num_ended += account.num_seen
        self._ended = _sum(self._ended, account.close())

    @property
    def num_seen(self) -> int:
        return self._num_ended + sum(account.num_seen for account in self._open)

    def close(self) -> PromptCounts:
        """Ends the account. Its counts change only if an input is still open."""
        self.closed = True
        return self.counts

    @property
    def counts(self) -> PromptCounts:
        total = self._ended
        for account in self._open:
            total = _sum(total, account.counts)
        return total


def _sum(one: PromptCounts, other: PromptCounts) -> PromptCounts:
    return PromptCounts(
        one.cache_read + other.cache_read, one.cache_write + other.cache_write, one.uncached + other.uncached
    )


@dataclass(slots=True)
class StepRecord:
    """Counts of one step after it ran. Times are the engine's clock, in seconds."""

    step: int
    num_seqs: int = 0
    num_tokens: int = 0
    num_kv_tokens: int = 0
    """Number of positions that attention read before each row's own tokens."""
    num_decode_seqs: int = 0
    num_prefill_tokens: int = 0
    num_batch_prefill_tokens: int = 0
    """Number of these tokens that belong to the batch tier."""
    num_batch_decode_tokens: int = 0
    """Number of tokens that decode rows of the batch tier computed, wrong proposals included."""
    num_recomputed: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    """Number of the proposed tokens that were accepted. They are among the output tokens."""
    num_lag_discarded: int = 0
    """Tokens that were computed in vain: their sequence had ended, or had lost the step before, when this step was
    launched or afterwards."""
    num_preempted: int = 0
    planned_at: float = 0.0
    launched_at: float = 0.0
    collected_at: float = 0.0
    plan_s: float = 0.0
    execute_s: float = 0.0
    """Seconds from when the device could begin (once the step before had ended) until the results were here."""
    commit_s: float = 0.0
    idle_s: float = 0.0
    """Seconds that the device waited for this step to be planned. It is a lower bound, as seen from the host."""


@dataclass(slots=True)
class StepTotals:
    """Sums over all steps of the process. `/metrics` reads them."""

    num_steps: int = 0
    num_prefill_tokens: int = 0
    num_recomputed: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_proposed: int = 0
    num_accepted: int = 0
    num_lag_discarded: int = 0
    num_preempted: int = 0
    plan_s: float = field(default=0.0)
    execute_s: float = field(default=0.0)
    commit_s: float = field(default=0.0)
    idle_s: float = field(default=0.0)

    def add(self, record: StepRecord) -> None:
        self.num_steps += 1
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(record, name))


_SUMMED = [entry.name for entry in fields(StepTotals) if entry.name != "num_steps"]


class Rate:
    """A moving average of tokens per busy second."""

    def __init__(self, share: float = 0.1) -> None:
        self._share = share
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        self._tokens += self._share * (num_tokens - self._tokens)
        self._seconds += self._share * (seconds - self._seconds)

    @property
    def per_second(self) -> float:
        return self._tokens / self._seconds if self._seconds > 0 else 0.0
