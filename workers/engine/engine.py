"""The engine thread: drain inbox, expire, plan, execute, commit, emit. It alone touches scheduler, cache and runner.

Knows attempts, steps and links by number; not sockets, not Redis, not which thread runs it. What came in is a pair
(link, message), what goes out is a `StepOutput`; both cross threads as values, by queues that the caller owns.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from cache.prefix_cache import PrefixCache
from workers.engine.attempts import Attempts
from workers.engine.errors import EngineBroken
from workers.engine.intake import Intake
from workers.engine.journal import EngineJournal
from workers.engine.outbox import Outbox
from workers.engine.plan import Draw, Drawn, Row, RowResult, StepRunner
from workers.engine.record import Rate, StepRecord, StepTotals
from workers.engine.scheduler import Limits, Scheduler, StepPlan, Work
from workers.engine.sequence import Attempt, Sequence
from workers.protocol.messages import (
    CacheCommand,
    Cancel,
    EngineAck,
    EngineRecord,
    ExtendLease,
    GenerateRequest,
    Message,
    WorkerStatus,
)

logger = logging.getLogger(__name__)

MAX_POISONED_STEPS = 3
TOTALS_EVERY_S = 1.0
POLL_S = 0.02
"""While attempts are parked or waiting, clocks are looked at this often; otherwise each `BEAT_S`."""
BEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """The link is gone: its attempts end."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Accept nothing new; with `now`, end what runs."""

    now: bool = False


@dataclass(frozen=True, slots=True)
class Stop:
    """Leave the loop."""


Event = Message | LinkClosed | Drain | Stop


@dataclass(slots=True)
class StepOutput:
    """What one round of the loop gives to the I/O thread. `messages` are in order for each link."""

    status: WorkerStatus
    num_attempts: int
    messages: list[tuple[int, Message]] = field(default_factory=list)
    records: list[EngineRecord] = field(default_factory=list)
    step: StepRecord | None = None
    token_gaps: dict[float, int] = field(default_factory=dict)
    """Seconds since a sequence's token before -> how many sequences."""
    ended: list[Attempt] = field(default_factory=list)


class Engine:
    def __init__(
        self,
        runner: StepRunner,
        cache: PrefixCache,
        limits: Limits,
        journal: EngineJournal | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.cache = cache
        self.scheduler = Scheduler(cache, limits)
        self.totals = StepTotals()
        self._outbox = Outbox()
        self._attempts = Attempts(
            Intake(runner, limits), self.scheduler, self._outbox, journal, clock
        )
        self._journal = journal
        self._clock = clock
        self._step = 0
        self._num_poisoned = 0
        self._prefill_rate = Rate()
        self._decode_rate = Rate()
        self._totals_due = 0.0
        self._out = StepOutput(WorkerStatus(), 0)
        self._touched: list[Attempt] = []
        self._busy = False

    @property
    def attempts(self) -> dict[tuple[int, str], Attempt]:
        return self._attempts.by_key

    # --- the loop ---

    def run(
        self, inbox: queue.SimpleQueue[tuple[int, Event]], deliver: Callable[[StepOutput], None]
    ) -> None:
        """Until `Stop`. Raises `EngineBroken`; everything else that a step may raise fails that step's attempts."""
        events: list[tuple[int, Event]] = []
        while not any(isinstance(event, Stop) for _, event in events):
            deliver(self.step(events))
            events = self._receive(inbox)

    def step(self, events: Seq[tuple[int, Event]] = ()) -> StepOutput:
        """One round. Without work it only handles the events and the clocks."""
        now = self._clock()
        self._drain_inbox(events, now)
        self._attempts.expire(now)
        plan = self.scheduler.plan(self._step, now)
        planned = self._clock()
        if plan.work and (results := self._execute(plan)) is not None:
            executed = self._clock()
            record = self._commit(plan, results, executed)
            record.plan_s, record.execute_s = planned - now, executed - planned
            record.commit_s = self._clock() - executed
            self._account(record, executed)
        self._busy = bool(plan.work or plan.num_preempted)
        return self._emit(plan, now)

    def _receive(self, inbox: queue.SimpleQueue[tuple[int, Event]]) -> list[tuple[int, Event]]:
        """Everything that has arrived; waits only if there is nothing to compute."""
        events: list[tuple[int, Event]] = []
        try:
            if self._busy:
                events.append(inbox.get_nowait())
            else:
                events.append(inbox.get(timeout=POLL_S if self.attempts else BEAT_S))
            while True:
                events.append(inbox.get_nowait())
        except queue.Empty:
            return events

    # --- inbox ---

    def _drain_inbox(self, events: Seq[tuple[int, Event]], now: float) -> None:
        for link, event in events:
            match event:
                case GenerateRequest():
                    self._attempts.accept(link, event, now, self._step)
                case ExtendLease():
                    self._attempts.extend(link, event, now)
                case Cancel():
                    self._attempts.cancel(link, event)
                case EngineAck() if self._journal is not None:
                    self._journal.ack(event.seq)
                case CacheCommand(action="unpin"):
                    self.cache.unpin(event.region)
                case CacheCommand(action="drop"):
                    self.cache.drop(event.region)
                case LinkClosed():
                    self._attempts.close_link(link)
                case Drain():
                    self._attempts.drain(now=event.now)
                case _:
                    pass

    # --- one step ---

    def _execute(self, plan: StepPlan) -> list[RowResult] | None:
        """None if the runner raised: the attempts of the step have failed then, all others go on."""
        rows = [self._row(work) for work in plan.work]
        try:
            if plan.copies:
                self.runner.copy_blocks(plan.copies)
            results = self.runner.launch(rows).collect()
            assert len(results) == len(rows), "the runner left out rows"
        except Exception:  # a model may raise anything; one bad step must not end a process
            logger.exception("step %d failed", plan.step, extra={"event": "step_poisoned"})
            self._poisoned(plan)
            return None
        self._num_poisoned = 0
        return results

    def _row(self, work: Work) -> Row:
        sequence, num_tokens, num_draws = work
        start = sequence.num_computed
        end = start + num_tokens
        attempt = sequence.attempt
        prompt_logprobs = next_token = -1
        if attempt.wants_prompt_logprobs:
            prompt_logprobs = attempt.message.prompt_logprobs
            next_token = attempt.prompt[end] if end < len(attempt.prompt) else -1
        return Row(
            sequence.tokens[start:end],
            start,
            sequence.block_ids,
            self._draws(sequence, num_draws),
            prompt_logprobs,
            next_token,
        )

    def _draws(self, sequence: Sequence, num_draws: int) -> tuple[Draw, ...]:
        if num_draws == 0:
            return ()
        attempt = sequence.attempt
        params, position = attempt.message.sampling, len(sequence.tokens)
        if not attempt.unforked:
            return (Draw(params, sequence.seed, position, attempt.prompt, sequence.output),)
        return tuple(
            Draw(params, seed, position, attempt.prompt, ())
            for seed in attempt.seeds(attempt.unforked[:num_draws])
        )

    def _poisoned(self, plan: StepPlan) -> None:
        self._num_poisoned += 1
        for work in plan.work:
            attempt = work.sequence.attempt
            if attempt.key in self.attempts:
                self._attempts.fail(
                    attempt, "internal", "the model failed in this step", retryable=True
                )
        if self._num_poisoned >= MAX_POISONED_STEPS:
            raise EngineBroken(f"{self._num_poisoned} steps in a row failed")

    def _commit(self, plan: StepPlan, results: list[RowResult], now: float) -> StepRecord:
        record = StepRecord(
            plan.step,
            num_seqs=len(plan.work),
            num_cached_tokens=plan.num_cached_tokens,
            num_preempted=plan.num_preempted,
        )
        for work, result in zip(plan.work, results, strict=True):
            self._commit_row(work, result, record, plan, now)
        # Behind all rows: a sibling of the last draw may be in prefill again.
        for attempt in self._touched:
            if attempt.lease.exhausted:
                self._attempts.end_choices(attempt, attempt.open_indices, "budget")
        return record

    def _account(self, record: StepRecord, now: float) -> None:
        self._out.step = record
        self.totals.add(record)
        if record.num_prefill_tokens:
            self._prefill_rate.add(record.num_prefill_tokens, record.execute_s)
        if record.num_decode_seqs:
            self._decode_rate.add(record.num_decode_seqs, record.execute_s)

    def _commit_row(
        self, work: Work, result: RowResult, record: StepRecord, plan: StepPlan, now: float
    ) -> None:
        sequence, num_tokens, num_draws = work
        attempt = sequence.attempt
        wanted_prompt_logprobs = attempt.wants_prompt_logprobs
        was_decode = sequence.decoding
        self.scheduler.advance(work, record)
        self._touched.append(attempt)
        if wanted_prompt_logprobs:
            attempt.prompt_logprobs.extend(result.prompt_logprobs)
        if not was_decode:
            attempt.event("chunk", now, plan.step, num_tokens)
        if sequence.num_uncomputed > 0 or (num_draws == 0 and attempt.message.max_tokens):
            return
        if not attempt.account.closed:
            self._close_prompt(attempt, sequence, plan, now)
        if num_draws == 0:
            self._attempts.end_choices(attempt, attempt.open_indices, "length")
            return
        attempt.lease.in_flight -= num_draws
        attempt.lease.spent += num_draws
        attempt.num_output += num_draws
        record.num_output_tokens += num_draws
        self.scheduler.counters.charge(attempt.message.tenant, output=num_draws)
        sequences = [sequence]
        if attempt.unforked:
            sequences = self.scheduler.fork(sequence, attempt.take_unforked(num_draws))
        for one, drawn in zip(sequences, result.drawn, strict=True):
            self._commit_token(one, drawn, now)

    def _close_prompt(
        self, attempt: Attempt, sequence: Sequence, plan: StepPlan, now: float
    ) -> None:
        attempt.account.close()
        if attempt.message.max_tokens:
            attempt.event("first_token", now, plan.step)
        if attempt.message.pinned:
            assert sequence.handle is not None
            attempt.pinned(self.cache.pin(sequence.handle))

    def _commit_token(self, sequence: Sequence, drawn: Drawn, now: float) -> None:
        seq_no = len(sequence.output)
        sequence.append(drawn.token)
        finish = sequence.finish_after(drawn.token)
        attempt = sequence.attempt
        self._outbox.token(attempt, sequence.index, seq_no, drawn.token, drawn.logprob, finish)
        if seq_no:
            gap = now - sequence.last_token_at
            self._out.token_gaps[gap] = self._out.token_gaps.get(gap, 0) + 1
        sequence.last_token_at = now
        if finish is not None:
            self._attempts.finish(sequence, finish)

    # --- emit ---

    def _emit(self, plan: StepPlan, now: float) -> StepOutput:
        """The journal first: what a gateway is told of, a killed worker must be able to prove."""
        if self._journal is not None:
            self._journal.count(self._touched)
            if now >= self._totals_due:
                self._journal.add_totals(self.totals)
                self._totals_due = now + TOTALS_EVERY_S
            self._journal.flush()
        out, self._out = self._out, StepOutput(WorkerStatus(), 0)
        out.messages = self._outbox.take(plan.step)
        out.ended, out.records = self._attempts.take_ended()
        out.status, out.num_attempts = self._status(), len(self.attempts)
        self._touched = []
        self._step += bool(plan.work)
        return out

    def _status(self) -> WorkerStatus:
        scheduler = self.scheduler
        return WorkerStatus(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.num_waiting_tokens,
            free_blocks=self.cache.num_free,
            evictable_blocks=self.cache.num_evictable,
            prefill_rate=self._prefill_rate.per_second,
            decode_rate=self._decode_rate.per_second,
            draining=self._attempts.draining,
        )
