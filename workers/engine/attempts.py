"""Who is here: how attempts enter, hear from their gateway, and leave. The step that feeds them is `engine`'s.

Every way out goes through `_end`, so that blocks, counters, journal and gateway can never disagree about an ending.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from workers.engine.errors import Refusal
from workers.engine.intake import Intake
from workers.engine.journal import EngineJournal
from workers.engine.outbox import Outbox
from workers.engine.scheduler import Scheduler
from workers.engine.sequence import Attempt, Sequence, Status
from workers.protocol.messages import (
    Cancel,
    EngineRecord,
    ExtendLease,
    FailCode,
    Failed,
    Finished,
    FinishReason,
    GenerateRequest,
    TokenUsage,
)


class Attempts:
    def __init__(
        self,
        intake: Intake,
        scheduler: Scheduler,
        outbox: Outbox,
        journal: EngineJournal | None,
        clock: Callable[[], float],
    ) -> None:
        self.by_key: dict[tuple[int, str], Attempt] = {}
        """By link and request id."""
        self.draining = False
        self._intake = intake
        self._scheduler = scheduler
        self._outbox = outbox
        self._journal = journal
        self._clock = clock
        self._ended: list[Attempt] = []
        self._records: list[EngineRecord] = []

    # --- ways in, and words on the way ---

    def accept(self, link: int, message: GenerateRequest, now: float, step: int) -> None:
        """An attempt begins, or is refused with its `Failed`."""
        try:
            if self.draining:
                raise Refusal("draining", "the worker is draining", retryable=True)
            if (link, message.request_id) in self.by_key:
                raise Refusal("internal", "a request of this id is running on this link")
            attempt = self._intake.admit(message, link, now, self._scheduler.num_waiting)
        except Refusal as refusal:
            failed = Failed(
                message.request_id, message.attempt, TokenUsage(), refusal.code, str(refusal),
                refusal.retryable, refusal.retry_after_ms,
            )  # fmt: skip
            self._outbox.ending(link, failed)
            return
        quota = message.cache_quota_blocks
        self._scheduler.cache.set_share(
            message.tenant, floor=message.cache_floor_blocks, quota=None if quota < 0 else quota
        )
        self.by_key[attempt.key] = attempt
        attempt.event("queued", now, step, len(attempt.prompt))
        self._scheduler.add(attempt)
        if self._journal is not None:
            self._journal.begin(attempt)

    def extend(self, link: int, message: ExtendLease, now: float) -> None:
        attempt = self.by_key.get((link, message.request_id))
        if attempt is None:
            return  # it ended while the extension was on its way
        self._scheduler.extend(attempt, message, now)
        if attempt.lease.exhausted and attempt.at_bound:
            self.end_choices(attempt, attempt.open_indices, "budget")

    def cancel(self, link: int, message: Cancel) -> None:
        attempt = self.by_key.get((link, message.request_id))
        if attempt is None:
            return
        wanted = [i for i in attempt.open_indices if message.index in (-1, i)]
        self.end_choices(attempt, wanted, "cancelled")

    def close_link(self, link: int) -> None:
        """Nobody is there to be told."""
        for attempt in [a for a in self.by_key.values() if a.link == link]:
            self._end(attempt, "link_lost", None)

    def drain(self, *, now: bool) -> None:
        """Nothing new from here on; with `now`, what runs is handed back."""
        self.draining = True
        if now:
            for attempt in list(self.by_key.values()):
                self.fail(attempt, "draining", "cut by the drain limit", retryable=True)

    def expire(self, now: float) -> None:
        for attempt in self._intake.past_deadline(now):
            if self.by_key.get(attempt.key) is attempt:
                self.fail(attempt, "deadline", "the deadline passed")
        for attempt in self._scheduler.expire(now):
            self.end_choices(attempt, attempt.open_indices, "lease")

    # --- ways out ---

    def end_choices(self, attempt: Attempt, indices: list[int], reason: FinishReason) -> None:
        """Ends choices between tokens; with the last of them the attempt."""
        for index in indices:
            seq_no = 0
            if index in attempt.unforked:
                attempt.unforked.remove(index)
            else:
                sequence = next(s for s in attempt.sequences if s.index == index)
                seq_no = len(sequence.output)
                self._scheduler.end(sequence)
            self._outbox.choice_ended(attempt, index, seq_no, reason)
        if indices and not attempt.open_indices:
            self._end(attempt, reason, self._finished(attempt, reason))

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """A choice ended with the token just told of."""
        attempt = sequence.attempt
        self._scheduler.end(sequence)
        if not attempt.open_indices:
            self._end(attempt, reason, self._finished(attempt, reason))

    def _finished(self, attempt: Attempt, reason: FinishReason) -> Finished:
        message = attempt.message
        return Finished(
            message.request_id, message.attempt, attempt.usage, reason, attempt.cache_report
        )

    def fail(self, attempt: Attempt, code: FailCode, text: str, *, retryable: bool = False) -> None:
        message = attempt.message
        failed = Failed(
            message.request_id, message.attempt, attempt.usage, code, text, retryable=retryable
        )
        self._end(attempt, code, failed)

    def _end(self, attempt: Attempt, reason: str, ending: Finished | Failed | None) -> None:
        """The one place where an attempt ends: blocks back, books closed, gateway told (if it is still there)."""
        for sequence in attempt.sequences:
            if sequence.status is not Status.ENDED:
                self._scheduler.end(sequence)
        self._scheduler.leave(attempt)
        del self.by_key[attempt.key]
        attempt.event("finished", self._clock())
        attempt.end_reason = reason
        if self._journal is not None:
            self._records.append(self._journal.end(attempt))
        self._ended.append(attempt)
        if ending is not None:
            attempt.residency.change(0, self._scheduler.cache.now_ms())
            told = msgspec.structs.replace(
                ending,
                timeline=attempt.timeline,
                held_block_ms=attempt.residency.block_ms,
            )
            self._outbox.ending(attempt.link, told)

    def take_ended(self) -> tuple[list[Attempt], list[EngineRecord]]:
        """Since the last call; records only with a journal."""
        ended, records = self._ended, self._records
        self._ended, self._records = [], []
        return ended, records
