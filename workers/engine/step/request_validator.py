"""Checks whether this worker takes a request. The module is pure. It decides nothing about order, and leaves the check
of each number and id to `faults`.

A gateway can cause every error here, so every error is a `Refusal`, never an assertion.
"""

from __future__ import annotations

from collections.abc import Callable, Set

from cache.tree.namespaces import segments
from workers.engine.beams import beams
from workers.engine.scheduling.kv_layout import KVLayout
from workers.engine.scheduling.step_plan import Limits
from workers.engine.sequences.bans import Bans, bans_of
from workers.engine.sequences.sequence import Attempt
from workers.engine.step import faults
from workers.engine.values.errors import Refusal
from workers.engine.values.plan import LoadedAdapter, StepRunner
from workers.protocol.frames import MAX_FRAME_BYTES
from workers.protocol.messages import GenerateRequest, SamplingParams

MAX_PRESENT = 10_000
"""Largest number of requests that a worker has at once. A tenant has at most as many as are still free for others: a
single tenant half of them, each of two a third, so nobody's queue keeps others out (dynamic thresholds, Choudhury and
Hahne 1998)."""
OVERLOAD_RETRY_MS = 1000
PINNED_PART = 5
"""At most a 1 / `PINNED_PART` part of the pool's blocks may be pinned."""
LOGPROB_BYTES = 32
"""Generous estimate of the bytes of one token's logprob on the wire."""


class RequestValidator:
    def __init__(self, runner: StepRunner, limits: Limits, leaving: Callable[[], Set[str]], layout: KVLayout) -> None:
        """Creates the validator. `leaving` returns the adapters that take no new requests."""
        self._runner = runner
        self._limits = limits
        self._leaving = leaving
        self._layout = layout
        self._num_admitted = 0

    def admit(self, message: GenerateRequest, link: int, now: float, num_present: int, num_own: int) -> Attempt:
        """Checks a request and returns its attempt. `num_present` requests are here, `num_own` of them of the same
        tenant. Raises `Refusal`."""
        if num_own >= MAX_PRESENT - num_present:
            raise Refusal(
                "overloaded",
                f"{num_own} requests of this tenant are here already, of {num_present}",
                retry_after_ms=OVERLOAD_RETRY_MS,
            )
        self._check_form(message)
        self._check_size(message)
        self._check_task(message)
        if message.root != self._runner.root:
            raise Refusal("wrong_root", f"this worker serves {self._runner.root!r}")
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
            gang=message.beams is not None,
            abilities=self._runner.abilities,
        )
        try:
            segments(attempt.path, self._runner.block_size)
        except ValueError as error:
            raise Refusal("internal", str(error)) from None
        if message.beams is not None:
            self._check_beams(attempt)
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
            raise Refusal("wrong_root", f"this worker has no adapter {name!r}")
        return found

    def _check_form(self, message: GenerateRequest) -> None:
        if fault := faults.of_request(message, self._runner.vocab_size):
            raise Refusal("internal", f"the request has {fault}")

    def _check_task(self, message: GenerateRequest) -> None:
        """Refuses what this worker's model cannot do. A gateway knows it from `Hello`."""
        abilities, pooling = self._runner.abilities, message.pooling
        task = "generate" if pooling is None else pooling.task
        if task not in abilities.tasks:
            raise Refusal("internal", f"this worker's model does not {task}")
        if pooling is None:
            return
        if not abilities.allows(pooling.dimensions):
            raise Refusal("internal", f"a vector of this model is not cut to {pooling.dimensions} numbers")
        if bool(pooling.labels) != (task == "score" and abilities.pairs == "labels"):
            raise Refusal("internal", "the request has labels that this model does not use, or lacks them")

    def _check_beams(self, attempt: Attempt) -> None:
        if self._layout.num_copies(attempt):
            raise Refusal(
                "too_long",
                f"beams of {attempt.end_len} tokens are more than the KV budget of this worker,"
                f" beyond which nothing is shared",
            )
        runner = self._runner
        capacity = runner.num_blocks - 1 - runner.num_blocks // PINNED_PART
        beams.check(attempt, capacity, runner.block_size, runner.vocab_size)

    def _check_size(self, message: GenerateRequest) -> None:
        longest = max((len(output) for _, output in message.resume), default=0)
        prompts = (len(message.prompt),) if message.pooling is None else message.pooling.lengths
        num_tokens = max(prompts) + longest
        room = 1 if message.max_tokens else 0
        if num_tokens + room > self._limits.max_len:
            raise Refusal("too_long", f"{num_tokens} tokens do not fit the {self._limits.max_len} of this worker")
        if message.num_choices > self._limits.max_running:
            raise Refusal("too_long", f"{message.num_choices} choices are more than run at once")
        num_logprobs = len(message.prompt) * (message.prompt_logprobs + 1)
        if num_logprobs * LOGPROB_BYTES > MAX_FRAME_BYTES // 2:
            raise Refusal("too_long", "logprobs of so long a prompt do not fit a frame")
        num_output = min(message.max_tokens, self._limits.max_len - len(message.prompt)) * message.num_choices
        num_logprobs = num_output * (message.sampling.logprobs + 1)
        if message.beams is not None and num_logprobs * LOGPROB_BYTES > MAX_FRAME_BYTES // 2:
            raise Refusal("too_long", "logprobs of so many and long texts do not fit a frame")
