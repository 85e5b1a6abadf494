"""The attempts that a worker has: how they enter, get messages from their gateway, and leave. `engine` runs the steps.

Every ending goes through `_end`, so that blocks, counters, journal and gateway can never disagree about it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

import msgspec

from workers.engine.beams.beams import Beams
from workers.engine.beams.search import Hypothesis
from workers.engine.grammars.grammar import Key, Outcome, digest
from workers.engine.grammars.grammar_queue import GrammarsWait
from workers.engine.grammars.library import Compiled, GrammarError
from workers.engine.grammars.mask_time import MaskTimes
from workers.engine.journal.journal import EngineJournal
from workers.engine.scheduling.scheduler import Scheduler
from workers.engine.sequences.sequence import Attempt, Sequence, Status
from workers.engine.step.request_validator import RequestValidator
from workers.engine.step.step_messages import StepMessages
from workers.engine.tiers.shared_cache.shared import SharedTier
from workers.engine.values.errors import Refusal
from workers.protocol.counts import EngineRecord, TokenUsage
from workers.protocol.messages import Cancel, ExtendLease, FailCode, Failed, Finished, FinishReason, GenerateRequest

logger = logging.getLogger(__name__)

BROKEN = "the worker failed on this request"
GRAMMARS_RETRY_MS = 2000


class GrammarSource(Protocol):
    """Compiler that works outside the engine thread (grammars/compiling.py). None of its calls waits."""

    def ask(self, key: Key, text: str) -> Compiled | None:
        """Returns the compiled grammar, or None if `take` will return it later. Raises `GrammarError` for one that was
        refused before."""
        ...

    def drop(self, key: Key) -> bool:
        """Cancels a grammar that nobody waits for any more. Returns False if it is too late for that, and `take` will
        return it."""
        ...

    def take(self) -> list[tuple[Key, Outcome]]:
        """Returns the outcomes that were decided since the last call."""
        ...


def log_fields(event: str, message: GenerateRequest) -> dict[str, str]:
    """Returns the fields of a log line about a request. With the trace id the line is found from the trace."""
    return {"event": event, "request_id": message.request_id, "trace_id": message.traceparent[3:35]}


class Attempts:
    def __init__(
        self,
        intake: RequestValidator,
        scheduler: Scheduler,
        outbox: StepMessages,
        journal: EngineJournal | None,
        clock: Callable[[], float],
        beams: Beams,
        grammars: GrammarSource | None = None,
    ) -> None:
        self.by_key: dict[tuple[int, str], Attempt] = {}
        """Attempts by link and request id."""
        self.draining = False
        self._intake = intake
        self._mask_times = MaskTimes()
        self._scheduler = scheduler
        self._outbox = outbox
        self._journal = journal
        self._clock = clock
        self._beams = beams
        self._grammars = grammars
        self._compiling: dict[Key, list[Attempt]] = {}
        """Attempts that wait for a grammar."""
        self.shared: SharedTier | None = None
        self._ended: list[Attempt] = []
        self._records: list[EngineRecord] = []

    # --- new attempts, and messages for them ---

    def accept(self, link: int, message: GenerateRequest, now: float, step: int) -> None:
        """Begins an attempt, or refuses it with its `Failed`."""
        try:
            if self.draining:
                raise Refusal("draining", "the worker is draining")
            if self._journal is not None and not self._journal.is_writable:
                raise Refusal("disk_full", "the journal has no room")
            if (link, message.request_id) in self.by_key:
                raise Refusal("internal", "a request of this id is running on this link")
            num_own = self._scheduler.counters.num_requests(message.tenant)
            attempt = self._intake.admit(message, link, now, len(self.by_key), num_own)
            after_s = self._scheduler.refuse(attempt, now)
            if after_s > 0:
                raise Refusal(
                    "overloaded", "the first token would come too late", retry_after_ms=math.ceil(after_s * 1000)
                )
            self._ask_grammar(attempt)
            if self._journal is not None:
                self._journal.begin(attempt)
        except Refusal as refusal:
            self._refuse(link, message, refusal)
            return
        except Exception:  # one request must not end a process, whatever it made raise
            logger.exception("a request was not taken in", extra=log_fields("request_broken", message))
            self._refuse(link, message, Refusal("internal", BROKEN))
            return
        quota = message.cache_quota_blocks
        self._scheduler.cache.set_share(
            message.tenant, floor=message.cache_floor_blocks, quota=None if quota < 0 else quota
        )
        self.by_key[attempt.key] = attempt
        self._beams.begin(attempt)
        attempt.report.event("queued", now, step, len(attempt.prompt))
        if message.grammar:
            attempt.report.event("compiling" if attempt.grammar is None else "compiled", now, step)
        self._ask_shared(attempt, now, step)
        self._scheduler.add(attempt)

    def _refuse(self, link: int, message: GenerateRequest, refusal: Refusal) -> None:
        failed = Failed(
            message.request_id, message.attempt, TokenUsage(), refusal.code, str(refusal), refusal.retry_after_ms
        )
        self._outbox.ending(link, failed)

    def _ask_grammar(self, attempt: Attempt) -> None:
        """Gives the attempt its grammar, or makes it wait for it. Raises `Refusal`."""
        message = attempt.message
        if not message.grammar:
            return
        if self._grammars is None:
            raise Refusal("grammar", "this worker compiles no grammars")
        key = message.tenant, digest(message.grammar)
        try:
            compiled = self._grammars.ask(key, message.grammar)
            if compiled is not None:
                attempt.use_grammar(compiled, self._mask_times.of(message.tenant))
        except GrammarsWait as error:
            raise Refusal("overloaded", str(error), retry_after_ms=GRAMMARS_RETRY_MS) from None
        except GrammarError as error:
            raise Refusal("grammar", str(error)) from None
        if compiled is None:
            self._compiling.setdefault(key, []).append(attempt)
            for sequence in attempt.sequences:
                sequence.status = Status.COMPILING

    def _ask_shared(self, attempt: Attempt, now: float, step: int) -> None:
        """Makes the attempt wait for the KV that other workers may have of its prompt, unless it waits already."""
        if self.shared is None or attempt.inputs is not None or not self.shared.ask(attempt, now):
            return
        waiting = [sequence for sequence in attempt.sequences if sequence.status is Status.WAITING]
        for sequence in waiting:
            sequence.status = Status.FETCHING
        if waiting:
            attempt.report.event("fetching", now, step)

    def take_shared(self, now: float) -> None:
        """Lets attempts run that need not wait for others' KV any more."""
        for attempt in self.shared.take(now) if self.shared is not None else ():
            waits = any(s.status is Status.FETCHING for s in attempt.sequences)
            if waits and self.by_key.get(attempt.key) is attempt:
                attempt.report.event("fetched", now)
                self._scheduler.release(attempt)

    def _leave_grammar(self, attempt: Attempt) -> None:
        """Removes an ended attempt from those that wait for a grammar. A grammar that nobody waits for is not
        compiled."""
        if self._grammars is None or not (self._compiling and attempt.message.grammar):
            return
        key = attempt.message.tenant, digest(attempt.message.grammar)
        waiting = self._compiling.get(key, [])
        if attempt in waiting:
            waiting.remove(attempt)
            if not waiting and self._grammars.drop(key):
                del self._compiling[key]

    def take_grammars(self, now: float) -> None:
        """Lets attempts run whose grammar is ready, or fails them without a token if it was refused or not
        compiled."""
        if self._grammars is None:
            return
        for key, outcome in self._grammars.take():
            for attempt in self._compiling.pop(key, ()):
                if self.by_key.get(attempt.key) is not attempt:
                    continue  # it ended meanwhile
                try:
                    if isinstance(outcome, GrammarError):
                        raise type(outcome)(str(outcome))
                    attempt.use_grammar(outcome, self._mask_times.of(attempt.message.tenant))
                except GrammarsWait as error:
                    self.fail(attempt, "overloaded", str(error))
                except GrammarError as error:
                    self.fail(attempt, "grammar", str(error))
                except Exception:
                    logger.exception("a grammar cannot begin", extra=log_fields("request_broken", attempt.message))
                    self.broken(attempt)
                else:
                    attempt.report.event("compiled", now)
                    self._scheduler.release(attempt)

    def extend(self, link: int, message: ExtendLease, now: float) -> None:
        attempt = self.by_key.get((link, message.request_id))
        if attempt is None or attempt.inputs is not None:
            return  # it ended while the extension was on its way, or draws nothing
        self._scheduler.extend(attempt, message, now)
        if attempt.lease.exhausted and attempt.at_bound:
            self.out_of_budget(attempt)

    def cancel(self, link: int, message: Cancel) -> None:
        attempt = self.by_key.get((link, message.request_id))
        if attempt is None:
            return
        if attempt.inputs is not None:
            self._end(attempt, "cancelled", self._finished(attempt, "cancelled"))
            return
        if attempt.gang and message.index >= 0:
            return  # its choices are not known before its end
        wanted = [i for i in attempt.open_indices if message.index in (-1, i)]
        self.end_choices(attempt, wanted, "cancelled")

    def close_link(self, link: int) -> None:
        """Ends the attempts of a link that closed. Nobody is there to be sent a message."""
        for attempt in [a for a in self.by_key.values() if a.link == link]:
            self._end(attempt, "link_lost", None)

    def drain(self, *, now: bool) -> None:
        """Accepts nothing new from here on. With `now`, the running attempts are handed back."""
        self.draining = True
        if now:
            for attempt in list(self.by_key.values()):
                self.fail(attempt, "draining", "the drain limit cut it off")

    def expire(self, now: float) -> None:
        for attempt in self._scheduler.expire(now):
            self.end_choices(attempt, attempt.open_indices, "lease")

    # --- endings ---

    def end_choices(self, attempt: Attempt, indices: list[int], reason: FinishReason) -> None:
        """Ends choices between tokens. With the last of them the attempt ends."""
        for index in indices:
            seq_no = 0
            if index in attempt.unforked:
                attempt.unforked.remove(index)
            else:
                sequence = next(s for s in attempt.sequences if s.index == index)
                seq_no = 0 if attempt.gang else len(sequence.output)
                self._scheduler.end(sequence)
            self._outbox.choice_ended(attempt, index, seq_no, reason)
        if indices and not attempt.open_indices:
            self._end(attempt, reason, self._finished(attempt, reason))

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a choice with the token that was just sent."""
        attempt = sequence.attempt
        self._scheduler.end(sequence)
        if not attempt.open_indices:
            self._end(attempt, reason, self._finished(attempt, reason))

    def finish_input(self, sequence: Sequence, vector: bytes) -> None:
        """Ends an input with its result, and begins the next one. With the last of them the attempt ends."""
        attempt, inputs = sequence.attempt, sequence.attempt.inputs
        assert inputs is not None
        self._scheduler.end(sequence)
        inputs.account.end(sequence.account)
        inputs.num_ended += 1
        self._outbox.vector(attempt, sequence.index, vector)
        if (following := attempt.next_input()) is not None:
            self._scheduler.add_input(following)
        elif inputs.all_ended:
            inputs.account.close()
            self._end(attempt, "stop", self._finished(attempt, "stop"))

    def out_of_budget(self, attempt: Attempt) -> None:
        """Ends an attempt whose lease is spent. A search that began returns the texts that it has."""
        if attempt.gang and attempt.drawn:
            self.finish_search(attempt, self._beams.cut(attempt), "budget")
        else:
            self.end_choices(attempt, attempt.open_indices, "budget")

    def finish_search(self, attempt: Attempt, texts: Seq[Hypothesis], cut: FinishReason = "length") -> None:
        """Sends the best texts of a search as the choices. `cut` is the finish reason of texts that no end token
        ended."""
        for index, text in enumerate(texts):
            self._outbox.hypothesis(attempt, index, text, "stop" if text.ended else cut)
        reason: FinishReason = "stop" if all(text.ended for text in texts) else cut
        self._end(attempt, reason, self._finished(attempt, reason))

    def _finished(self, attempt: Attempt, reason: FinishReason) -> Finished:
        message = attempt.message
        return Finished(message.request_id, message.attempt, attempt.usage, reason, attempt.report.cache)

    def fail(self, attempt: Attempt, code: FailCode, text: str) -> None:
        message = attempt.message
        failed = Failed(message.request_id, message.attempt, attempt.usage, code, text)
        self._end(attempt, code, failed)

    def broken(self, attempt: Attempt, code: FailCode = "internal", text: str = BROKEN) -> None:
        """Fails an attempt because work for it alone raised an exception, unless it just ended."""
        if self.by_key.get(attempt.key) is attempt:
            self.fail(attempt, code, text)

    def _end(self, attempt: Attempt, reason: str, ending: Finished | Failed | None) -> None:
        """Ends an attempt, in this one place: its blocks are given back, its accounts are closed, and the gateway is
        sent the ending if it is still there."""
        for sequence in attempt.sequences:
            if sequence.status is not Status.ENDED:
                self._scheduler.end(sequence)
        attempt.unforked = []  # no choice is open any more, those that never began included
        self._scheduler.leave(attempt)
        self._leave_grammar(attempt)
        self._beams.leave(attempt)
        del self.by_key[attempt.key]
        attempt.report.event("finished", self._clock())
        attempt.end_reason = reason
        if self._journal is not None:
            self._records.append(self._journal.end(attempt))
        self._ended.append(attempt)
        if ending is not None:
            told = msgspec.structs.replace(ending, timeline=attempt.report.timeline)
            self._outbox.ending(attempt.link, told)

    def take_ended(self) -> tuple[list[Attempt], list[EngineRecord]]:
        """Returns the attempts that ended since the last call, and their records if there is a journal."""
        ended, records = self._ended, self._records
        self._ended, self._records = [], []
        return ended, records
