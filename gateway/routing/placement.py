"""The choice of the best worker for one prompt: a pure function of what is known of each worker, in seconds.

Affinity and load both count: the worker with the shortest time to the first token is chosen. A worker with more than a
quarter above the mean of all work is left out, so hot prefixes spread by themselves. If nothing of a tenant's own part
is cached, a hash of that part decides, so that all gateways send equal beginnings to the same worker. It knows no
links, no clock, no index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Literal

import msgspec

Reason = Literal["only", "affinity", "bound", "load", "cold"]
"""The reason for a choice. only: there was a single worker. affinity: the worker has most of the prompt. bound: the
worker with most of the prompt has too much to do. load: the worker with most of the prompt would take longer. cold: no
worker has any of the tenant's own part.
"""

LOAD_BOUND = 1.25
DEFAULT_PREFILL_RATE = 1000.0
DEFAULT_DECODE_RATE = 50.0
"""Tokens per second of workers without a measurement, if no other worker has one."""


class Candidate(msgspec.Struct, frozen=True):
    """One worker that may take the request."""

    worker: str
    num_cached: int = 0
    """The number of this prompt's tokens in the worker's cache."""
    num_queued: int = 0
    """The number of prompt tokens that wait on the worker."""
    num_sequences: int = 0
    """The number of sequences that run or wait."""
    max_running: int = 0
    """The most sequences that run at once; 0 means not known."""
    prefill_rate: float = 0.0
    decode_rate: float = 0.0
    """Tokens per second over all sequences; 0 means not measured."""


class Wanted(msgspec.Struct, frozen=True):
    num_prompt: int
    num_public: int = 0
    """Tokens of the public region, which every worker has or will have."""
    anchor: bytes = b""
    """The hash of the beginning of the tenant's own part. It is empty if that part is too short to have one."""
    num_output: float = 128.0
    """The expected number of output tokens."""


class Placement(msgspec.Struct, frozen=True):
    worker: str
    reason: Reason
    num_cached: int
    num_elsewhere: int
    """The most tokens of the prompt that another worker has."""
    ttft_s: float


def place(candidates: Sequence[Candidate], wanted: Wanted, turn: int = 0) -> Placement:
    """Chooses a worker. Candidates must not be empty. `turn` breaks ties of prompts without an anchor.
    O(candidates).
    """
    rates = _Rates(candidates)
    within = _within_bound(candidates, wanted, rates)
    most = max(c.num_cached for c in candidates)

    def ttft_s(c: Candidate) -> float:
        return rates.ttft_s(c, wanted)

    if all(c.num_cached <= wanted.num_public for c in within):
        chosen = _cold(within, wanted, rates, turn)
    else:
        chosen = min(within, key=lambda c: (ttft_s(c), -c.num_cached, c.worker))
    others = [c.num_cached for c in candidates if c is not chosen]
    return Placement(
        chosen.worker,
        _reason(candidates, within, chosen, most, wanted),
        chosen.num_cached,
        max(others, default=0),
        ttft_s(chosen),
    )


def alone(candidate: Candidate, num_prompt: int, num_output: float) -> Placement:
    """Returns what `place` returns for one candidate."""
    ttft_s = _Rates((candidate,)).ttft_s(candidate, Wanted(num_prompt, num_output=num_output))
    return Placement(candidate.worker, "only", candidate.num_cached, 0, ttft_s)


class _Rates:
    """The speeds of the workers. A missing measurement is replaced by the mean of the others."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
        self._prefill = _mean((c.prefill_rate for c in candidates), DEFAULT_PREFILL_RATE)
        self._decode = _mean((c.decode_rate for c in candidates), DEFAULT_DECODE_RATE)

    def ttft_s(self, c: Candidate, wanted: Wanted) -> float:
        """Seconds until the first token: the worker's queued prompts and this one, and the wait until a running
        sequence ends if all its places are taken.
        """
        num_tokens = c.num_queued + wanted.num_prompt - min(c.num_cached, wanted.num_prompt)
        too_many = max(0, c.num_sequences + 1 - c.max_running) if c.max_running else 0
        return num_tokens / (c.prefill_rate or self._prefill) + self._decode_s(c, too_many, wanted.num_output)

    def work_s(self, c: Candidate, num_output: float) -> float:
        """Seconds until the worker has nothing left to do."""
        queued_s = c.num_queued / (c.prefill_rate or self._prefill)
        return queued_s + self._decode_s(c, c.num_sequences, num_output)

    def request_s(self, wanted: Wanted) -> float:
        """Seconds for this request on a worker that has none of it cached."""
        return wanted.num_prompt / self._prefill + wanted.num_output / self._decode

    def _decode_s(self, c: Candidate, num_sequences: int, num_output: float) -> float:
        return num_sequences * num_output / (c.decode_rate or self._decode)


def _within_bound(candidates: Sequence[Candidate], wanted: Wanted, rates: _Rates) -> Sequence[Candidate]:
    """Returns the candidates within the load bound: consistent hashing with bounded loads (arXiv 1608.01350), with the
    request itself included in the mean. The result is never empty, because some worker has at most the mean.
    """
    work = [rates.work_s(c, wanted.num_output) for c in candidates]
    bound = LOAD_BOUND * (sum(work) + rates.request_s(wanted)) / len(candidates)
    within = [c for c, work_s in zip(candidates, work, strict=True) if work_s <= bound]
    return within or candidates


def _cold(within: Sequence[Candidate], wanted: Wanted, rates: _Rates, turn: int) -> Candidate:
    if wanted.anchor:
        most = max(c.num_cached for c in within)
        return max((c for c in within if c.num_cached == most), key=lambda c: _rendezvous(wanted.anchor, c.worker))
    least_s = min(rates.ttft_s(c, wanted) + rates.work_s(c, wanted.num_output) for c in within)
    equal = sorted(
        (c for c in within if rates.ttft_s(c, wanted) + rates.work_s(c, wanted.num_output) == least_s),
        key=lambda c: c.worker,
    )
    return equal[turn % len(equal)]


def _reason(
    candidates: Sequence[Candidate], within: Sequence[Candidate], chosen: Candidate, most: int, wanted: Wanted
) -> Reason:
    if len(candidates) == 1:
        return "only"
    if most <= wanted.num_public:
        return "cold" if wanted.anchor else "load"
    if chosen.num_cached == most:
        return "affinity"
    return "load" if max(c.num_cached for c in within) == most else "bound"


def _rendezvous(anchor: bytes, worker: str) -> bytes:
    return blake2b(anchor + worker.encode(), digest_size=8).digest()


def _mean(rates: Iterable[float], default: float) -> float:
    known = [rate for rate in rates if rate > 0]
    return sum(known) / len(known) if known else default


Choose = Callable[[Sequence[Candidate], Wanted, int], Placement]
"""The type of `place`, and of other rules to compare it with."""
