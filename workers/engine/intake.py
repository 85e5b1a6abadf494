"""Which requests this worker takes on, and until when. Pure; decides nothing about order.

Everything here can be caused by a gateway, so everything here is a `Refusal`, never an assertion.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Set

from cache.namespaces import segments
from workers.engine.errors import Refusal
from workers.engine.plan import LoadedAdapter, StepRunner
from workers.engine.sampling.bans import Bans, bans_of
from workers.engine.sequence import Attempt
from workers.engine.sparsity import Sparsity
from workers.engine.step_plan import Limits
from workers.protocol.frames import MAX_FRAME_BYTES
from workers.protocol.messages import GenerateRequest, SamplingParams

MAX_WAITING = 10_000
OVERLOAD_RETRY_MS = 1000
MAX_LENGTH_PENALTY = 10.0
PINNED_PART = 5
"""Of the pool one block in so many may be pinned."""
LOGPROB_BYTES = 32
"""One token's logprob on the wire, generously."""


class Intake:
    def __init__(
        self,
        runner: StepRunner,
        limits: Limits,
        leaving: Callable[[], Set[str]] = frozenset,
        sparsity: Sparsity | None = None,
    ) -> None:
        """`leaving`: adapters that take nobody any more."""
        self._runner = runner
        self._limits = limits
        self._leaving = leaving
        self._sparsity = sparsity
        self._num_admitted = 0
        self._deadlines: list[tuple[float, int, Attempt]] = []

    def admit(self, message: GenerateRequest, link: int, now: float, num_waiting: int) -> Attempt:
        """Raises `Refusal`."""
        if num_waiting >= MAX_WAITING:
            raise Refusal(
                "overloaded",
                f"{num_waiting} sequences wait already",
                retryable=True,
                retry_after_ms=OVERLOAD_RETRY_MS,
            )
        self._check_form(message)
        self._check_size(message)
        if message.root != self._runner.root:
            raise Refusal("wrong_root", f"this worker serves {self._runner.root!r}", retryable=True)
        if message.max_tokens and message.lease_bound <= 0:
            raise Refusal("no_lease", "the request came without a lease bound")
        self._num_admitted += 1
        attempt = Attempt(
            message,
            link,
            self._num_admitted,
            now,
            eos_token_ids=self._runner.eos_token_ids,
            max_len=self._limits.max_len,
            adapter=self._adapter(message.adapter),
            bans=self._bans(message.sampling),
        )
        try:
            segments(attempt.path, self._runner.block_size)
        except ValueError as error:
            raise Refusal("internal", str(error)) from None
        self._check_beams(attempt)
        if message.deadline_ms:
            heapq.heappush(self._deadlines, (attempt.deadline, attempt.serial, attempt))
        return attempt

    def _bans(self, sampling: SamplingParams) -> Bans | None:
        try:
            return bans_of(sampling, self._runner.eos_token_ids, self._runner.vocab_size)
        except ValueError as error:
            raise Refusal("internal", f"the request has bans of everything: {error}") from None

    def _adapter(self, name: str) -> LoadedAdapter | None:
        if not name:
            return None
        found = self._runner.adapters.get(name)
        if found is None or name in self._leaving():
            raise Refusal("wrong_root", f"this worker has no adapter {name!r}", retryable=True)
        return found

    def past_deadline(self, now: float) -> list[Attempt]:
        """Those whose deadline passed since the last call, ended ones included."""
        past: list[Attempt] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            past.append(heapq.heappop(self._deadlines)[2])
        return past

    def _check_form(self, message: GenerateRequest) -> None:
        sampling = message.sampling
        faults = {
            "an empty prompt": not message.prompt,
            "a token id outside of the vocabulary": self._foreign_ids(message),
            "a bad word without tokens": not all(sampling.bad_words),
            "a grammar, and bans beside it": bool(message.grammar)
            and bool(sampling.bad_words or sampling.allowed_token_ids),
            "a seed that is not an unsigned 64-bit number": not 0 <= sampling.seed < 2**64,
            "no choice at all": message.num_choices < 1,
            "a negative bound": min(message.max_tokens, message.num_output_spent) < 0,
            "a weight that is no positive number": not (
                math.isfinite(message.weight) and message.weight > 0
            ),
            "a quota below nothing": message.cache_floor_blocks < 0,
            "a worth outside of 0 to 100, or a negative time to live": any(
                not 0 <= one.priority <= 100 or min(one.start, one.ttl_s) < 0
                for one in message.retention
            )
            or message.output_priority > 100,
            "handed-over choices that do not exist": self._bad_resume(message),
            "a search that cannot be": message.beams is not None and self._bad_search(message),
        }
        for fault, present in faults.items():
            if present:
                raise Refusal("internal", f"the request has {fault}")

    def _foreign_ids(self, message: GenerateRequest) -> bool:
        size = self._runner.vocab_size
        sampling = message.sampling
        runs = [message.prompt, *(output for _, output in message.resume)]
        runs += [*sampling.bad_words, sampling.allowed_token_ids]
        return any(run and (min(run) < 0 or max(run) >= size) for run in runs)

    def _bad_resume(self, message: GenerateRequest) -> bool:
        indices = [index for index, _ in message.resume]
        return len(set(indices)) != len(indices) or any(
            not 0 <= index < message.num_choices or len(output) >= max(1, message.max_tokens)
            for index, output in message.resume
        )

    def _bad_search(self, message: GenerateRequest) -> bool:
        """Beams have no tokens to hand over, and follow nothing but logprobs."""
        assert message.beams is not None
        penalty = message.beams.length_penalty
        return (
            bool(message.grammar or message.resume)
            or message.max_tokens == 0
            or not (math.isfinite(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY)
        )

    def _check_beams(self, attempt: Attempt) -> None:
        """A search loses and gets its blocks as a whole, so all of it has to fit, and what its beams share now they may
        not share when they come back. Raises `Refusal`."""
        search, runner = attempt.search, self._runner
        if search is None:
            return
        if self._sparsity is not None and self._sparsity.applies(attempt):
            raise Refusal(
                "too_long",
                f"beams of {attempt.end_len} tokens are more than the KV budget of this worker,"
                f" beyond which nothing is shared",
            )
        if search.num_candidates > runner.vocab_size:
            raise Refusal("internal", "the request has more beams than the vocabulary feeds")
        num_blocks = search.width * -(-attempt.end_len // runner.block_size)
        capacity = runner.num_blocks - 1 - runner.num_blocks // PINNED_PART
        if num_blocks > capacity:
            most = capacity // search.width * runner.block_size
            raise Refusal(
                "too_long",
                f"{search.width} beams of {attempt.end_len} tokens do not fit this worker,"
                f" which holds {most} of each",
            )

    def _check_size(self, message: GenerateRequest) -> None:
        longest = max((len(output) for _, output in message.resume), default=0)
        num_tokens = len(message.prompt) + longest
        room = 1 if message.max_tokens else 0
        if num_tokens + room > self._limits.max_len:
            raise Refusal(
                "too_long",
                f"{num_tokens} tokens do not fit the {self._limits.max_len} of this worker",
            )
        if message.num_choices > self._limits.max_running:
            raise Refusal("too_long", f"{message.num_choices} choices are more than run at once")
        num_logprobs = len(message.prompt) * (message.prompt_logprobs + 1)
        if num_logprobs * LOGPROB_BYTES > MAX_FRAME_BYTES // 2:
            raise Refusal("too_long", "logprobs of so long a prompt do not fit a frame")
