"""Handling of a step that failed. Smaller steps follow if the device had no memory for it, and separate steps for its
rows if it raised.

The module knows plans, attempts and the steps in flight, but not how a step is launched or collected. A request is
blamed only while the device computes a step of the engine's own (pulse.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Set

from workers.engine.scheduling.scheduler import Scheduler
from workers.engine.scheduling.step_plan import StepPlan, Work
from workers.engine.sequences.sequence import Sequence, Status
from workers.engine.step.apart import Apart
from workers.engine.step.attempts import Attempts, log_fields
from workers.engine.step.pipeline import Pipeline
from workers.engine.step.pulse import Pulse
from workers.engine.values.errors import DeviceOutOfMemory, EngineBroken

logger = logging.getLogger(__name__)


class StepFailures:
    def __init__(
        self, scheduler: Scheduler, attempts: Attempts, pipeline: Pipeline, pulse: Pulse, clock: Callable[[], float]
    ) -> None:
        self.apart = Apart()
        self.pulse = pulse
        self._scheduler = scheduler
        self._attempts = attempts
        self._pipeline = pipeline
        self._clock = clock
        self._num_out_of_memory = 0
        self._num_poisoned = 0
        self._pulse_due = False
        """Whether a request failed alone and the device is still to be tested."""

    def failed(self, plan: StepPlan, error: Exception, void: Set[Sequence] = frozenset()) -> None:
        """Handles a failed step, of which nothing counts. The steps before it must be collected; those after it lose
        the rows that built on it. `void` are its own rows that built on a step that failed before. A step that has no
        other rows failed for that reason."""
        for work in plan.work:
            self._scheduler.undo(work)
        self._pipeline.void(plan)
        self._scheduler.collected(plan.step)
        live = [w for w in plan.work if w.sequence.status is not Status.ENDED and w.sequence not in void]
        out_of_memory = isinstance(error, DeviceOutOfMemory)
        self._num_out_of_memory += out_of_memory
        if not live:
            return
        if out_of_memory and not plan.copies:
            self._too_large(plan, live, error)
        else:
            self._poisoned(plan, live)

    def check_device(self) -> None:
        """Tests the device after a request was blamed and before anybody is sent the failure. No step may be in flight.
        Raises `EngineBroken` if the device computes nothing at all: then no request was to blame."""
        if not self._pulse_due:
            return
        self._pulse_due = False
        if not self.pulse.beats():
            raise EngineBroken("steps fail, and so does a step of the engine's own test request")

    def take_counts(self) -> tuple[int, int]:
        """Returns the number of steps that did not fit the device since the last call, and of attempts that failed
        alone."""
        counts = self._num_out_of_memory, self._num_poisoned
        self._num_out_of_memory = self._num_poisoned = 0
        return counts

    def _too_large(self, plan: StepPlan, live: list[Work], error: Exception) -> None:
        unable = self._scheduler.shrink(plan, live)
        logger.warning(
            "step %d did not fit the device: %s; %d tokens from here on",
            plan.step,
            error,
            self._scheduler.budget.num_tokens,
            extra={"event": "device_out_of_memory"},
        )
        if unable is not None:
            self._attempts.fail(unable.attempt, "internal", "one token did not fit the device's memory")

    def _poisoned(self, plan: StepPlan, live: list[Work]) -> None:
        """Ends an attempt that fails alone. Until that is known, the others of the step wait for their turn to run
        again."""
        unfilled = {block for _, block in plan.copies}
        attempts = dict.fromkeys(work.sequence.attempt for work in live)
        if unfilled:  # a copy failed: these blocks do not hold what their sequences wrote
            blamed = [a for a in attempts if any(unfilled & {*s.block_ids} for s in a.sequences)]
        else:
            alone = len({work.sequence.attempt for work in plan.work}) == 1
            one = self.apart.failed(list(attempts), self._clock(), alone=alone)
            blamed = [] if one is None else [one]
        for attempt in blamed:
            logger.error(
                "request %s failed its step",
                attempt.message.request_id,
                extra={**log_fields("attempt_poisoned", attempt.message), "tenant": attempt.message.tenant},
            )
            self._attempts.fail(attempt, "internal", "the model failed on this request")
        self._num_poisoned += len(blamed)
        self._pulse_due |= bool(blamed)
