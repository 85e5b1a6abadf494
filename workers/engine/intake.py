"""Which requests this worker takes on, and until when. Pure; decides nothing about order.

Everything here can be caused by a gateway, so everything here is a `Refusal`, never an assertion.
"""

from __future__ import annotations

import heapq
import math

from cache.namespaces import segments
from workers.engine.errors import Refusal
from workers.engine.plan import StepRunner
from workers.engine.sequence import Attempt
from workers.engine.step_plan import Limits
from workers.protocol.frames import MAX_FRAME_BYTES
from workers.protocol.messages import GenerateRequest

MAX_WAITING = 10_000
OVERLOAD_RETRY_MS = 1000
LOGPROB_BYTES = 32
"""One token's logprob on the wire, generously."""


class Intake:
    def __init__(self, runner: StepRunner, limits: Limits) -> None:
        self._runner = runner
        self._limits = limits
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
        if message.adapter and message.adapter not in self._runner.adapters:
            name = message.adapter
            raise Refusal("wrong_root", f"this worker has no adapter {name!r}", retryable=True)
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
            adapter=self._runner.adapters[message.adapter] if message.adapter else -1,
        )
        try:
            segments(attempt.path, self._runner.block_size)
        except ValueError as error:
            raise Refusal("internal", str(error)) from None
        if message.deadline_ms:
            heapq.heappush(self._deadlines, (attempt.deadline, attempt.serial, attempt))
        return attempt

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
        }
        for fault, present in faults.items():
            if present:
                raise Refusal("internal", f"the request has {fault}")

    def _foreign_ids(self, message: GenerateRequest) -> bool:
        size = self._runner.vocab_size
        runs = [message.prompt, *(output for _, output in message.resume)]
        return any(run and (min(run) < 0 or max(run) >= size) for run in runs)

    def _bad_resume(self, message: GenerateRequest) -> bool:
        indices = [index for index, _ in message.resume]
        return len(set(indices)) != len(indices) or any(
            not 0 <= index < message.num_choices or len(output) >= max(1, message.max_tokens)
            for index, output in message.resume
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
