"""The engine thread: drain inbox, expire, plan, launch, collect, commit, emit. It alone uses scheduler, cache and
runner.

The module knows attempts, steps, and links by number. It knows no sockets, no Redis, and not which thread runs it. An
input is a pair (link, message), and an output is a `StepOutput`. Both cross threads as values, by queues that the
caller owns.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from cache.prefix_cache import PrefixCache
from workers.engine.beams.beams import Beams
from workers.engine.journal.journal import EngineJournal
from workers.engine.lora.adapter_table import AdapterRead, AdapterTable
from workers.engine.reports.cache_feed import CacheFeed
from workers.engine.reports.cache_probe import probe
from workers.engine.reports.cache_watch import CacheFigures, CacheWatch
from workers.engine.reports.occupancy import Occupancy, occupancy
from workers.engine.scheduling.kv_layout import KVLayout
from workers.engine.scheduling.policy import FAIR, Policy
from workers.engine.scheduling.queue_watch import queue_figures
from workers.engine.scheduling.scheduler import Scheduler
from workers.engine.scheduling.speculation import Speculation
from workers.engine.scheduling.step_plan import Limits, StepPlan
from workers.engine.sequences.sequence import Attempt
from workers.engine.step import faults
from workers.engine.step.attempts import Attempts, GrammarSource
from workers.engine.step.commit import Commit
from workers.engine.step.pipeline import Pipeline
from workers.engine.step.pulse import Pulse
from workers.engine.step.request_validator import RequestValidator
from workers.engine.step.rows import Rows
from workers.engine.step.step_failures import StepFailures
from workers.engine.step.step_messages import StepMessages
from workers.engine.tiers.restores import Preempt
from workers.engine.tiers.shared_cache.shared import SharedTier
from workers.engine.values.errors import DeviceOutOfMemory
from workers.engine.values.host_port import HostBlocks
from workers.engine.values.plan import Row, StepRunner
from workers.engine.values.queue_figures import QueueFigures
from workers.engine.values.record import Rate, StepRecord, StepTotals
from workers.protocol.counts import EngineAck, EngineRecord
from workers.protocol.messages import (
    AdapterCommand,
    CacheCommand,
    CacheProbe,
    Cancel,
    ExtendLease,
    GenerateRequest,
    Message,
)
from workers.protocol.reports import AdapterState, WorkerStatus

logger = logging.getLogger(__name__)

POLL_S = 0.02
"""Seconds between two looks at the clocks while there are attempts but nothing to compute. Without attempts it is
`BEAT_S`."""
BEAT_S = 0.5
STORE_POLL_S = 0.002
"""Seconds between two polls while attempts wait for the shared cache and there is nothing else to do."""


@dataclass(frozen=True, slots=True)
class LinkClosed:
    """Event of a link that is gone, so that its attempts end."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Command to accept nothing new. With `now` it also ends what runs."""

    now: bool = False


@dataclass(frozen=True, slots=True)
class Accept:
    """Command to accept requests again, after a `Drain` that ended nothing."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Command to leave the loop."""


Event = Message | AdapterRead | LinkClosed | Drain | Accept | Stop


@dataclass(slots=True)
class StepOutput:
    """Output of one round of the loop for the I/O thread. `messages` are in order for each link."""

    status: WorkerStatus
    num_attempts: int
    messages: list[tuple[int, Message]] = field(default_factory=list)
    records: list[EngineRecord] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    """Records of the steps that were collected in this round."""
    num_out_of_memory: int = 0
    """Number of steps that did not fit the device."""
    num_poisoned: int = 0
    """Number of attempts that were ended because their own row made a step fail."""
    token_gaps: dict[float, int] = field(default_factory=dict)
    """Map from the seconds since a sequence's token before to the number of sequences."""
    ended: list[Attempt] = field(default_factory=list)
    cache: CacheFigures | None = None
    """Figures of the cache. They are there once a second."""
    occupancy: Occupancy | None = None
    """Use of blocks. It is there together with `cache`."""
    queues: QueueFigures | None = None
    """Figures of who waits and who was preempted. They are there together with `cache`."""
    adapters: tuple[AdapterState, ...] | None = None
    """States of all adapters, when one changed."""


class Engine:
    def __init__(
        self,
        runner: StepRunner,
        cache: PrefixCache,
        limits: Limits,
        journal: EngineJournal | None = None,
        *,
        grammars: GrammarSource | None = None,
        lag: bool = True,
        speculation: Speculation | None = None,
        host: HostBlocks | None = None,
        preempt: Preempt = "auto",
        layout: KVLayout | None = None,
        policy: Policy = FAIR,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates the engine. With `lag` it uses the lag that the runner offers. `host` has the bytes of the cache's
        host tier, if there is one. With a `layout` sequences may lose blocks, which excludes steps in flight and
        guesses."""
        assert layout is None or speculation is None
        self.runner = runner
        self.cache = cache
        self.scheduler = Scheduler(cache, limits, host, preempt, layout, policy)
        self.scheduler.speculation = speculation
        self.totals = StepTotals()
        self._outbox = StepMessages()
        self._adapters = AdapterTable(runner)
        beams = Beams(self.scheduler)
        self._attempts = Attempts(
            RequestValidator(runner, limits, lambda: self._adapters.leaving, self.scheduler.layout),
            self.scheduler,
            self._outbox,
            journal,
            clock,
            beams,
            grammars,
        )
        self._commit = Commit(self.scheduler, self._attempts, self._outbox, beams)
        self._rows = Rows(self.scheduler, beams)
        self._pipeline = Pipeline(runner, clock)
        pulse = Pulse(runner, self.scheduler.block_tables)
        self.failures = StepFailures(self.scheduler, self._attempts, self._pipeline, pulse, clock)
        self._lag = runner.lag if lag and layout is None else 0
        self._journal = journal
        self._clock = clock
        self._step = 0
        self._decode_rate = Rate()
        self._watch = CacheWatch(cache, self.scheduler.restores)
        self._feed = CacheFeed(cache, runner.root)
        self._out = StepOutput(WorkerStatus(), 0)
        self._busy = False

    @property
    def num_in_flight(self) -> int:
        """Steps launched and not collected."""
        return len(self._pipeline)

    @property
    def attempts(self) -> dict[tuple[int, str], Attempt]:
        return self._attempts.by_key

    def share(self, shared: SharedTier) -> None:
        """Attaches the shared tier. Blocks that the host keeps go to other workers too, and theirs can be used here."""
        assert self.scheduler.restores is not None
        self._attempts.shared = self._watch.shared = shared
        self.scheduler.restores.on_written = shared.offer

    @property
    def shared(self) -> SharedTier | None:
        return self._attempts.shared

    # --- the loop ---

    def run(self, inbox: queue.SimpleQueue[tuple[int, Event]], deliver: Callable[[StepOutput], None]) -> None:
        """Runs rounds until `Stop`. Raises `EngineBroken`; anything else that a step may raise ends only the attempt
        that caused it."""
        events: list[tuple[int, Event]] = []
        while not any(isinstance(event, Stop) for _, event in events):
            deliver(self.step(events))
            events = self._receive(inbox)

    def step(self, events: Seq[tuple[int, Event]] = ()) -> StepOutput:
        """Runs one round: handle events, plan and launch a step, collect and commit the one before. With lag one step
        is in flight when it returns. Without lag, or where the next plan needs the results, none is. Without work it
        only handles the events and the clocks."""
        now = self._clock()
        self._drain_inbox(events, now)
        self._attempts.take_grammars(now)
        self._attempts.take_shared(now)
        self._attempts.expire(now)
        plan = self._plan(now)
        failure = self._launch(plan) if plan.work else None
        num_kept = 0 if plan.holds_next or failure or not plan.work else self._lag
        self._busy = bool(plan.work or plan.num_preempted or len(self._pipeline))
        while len(self._pipeline) > num_kept:
            if not self._collect():
                num_kept = 0
        if failure is not None:
            self.failures.failed(plan, failure)
        self.failures.check_device()
        if not self._busy:
            self._await_restore()
            self._pipeline.rest()
        if self._adapters.leaving and not len(self._pipeline):
            self._adapters.settle({a.message.adapter for a in self.attempts.values()})
        return self._emit(now)

    def _await_restore(self) -> None:
        """Waits for a restore, because there is nothing to compute and a sequence waits for blocks. The copy is
        short."""
        restores, shared = self.scheduler.restores, self._attempts.shared
        if restores is not None and restores.num_open:
            self._busy = True
            restores.wait()
        elif shared is not None and shared.num_waiting:
            self._busy = True
            shared.wait(STORE_POLL_S)

    def _receive(self, inbox: queue.SimpleQueue[tuple[int, Event]]) -> list[tuple[int, Event]]:
        """Returns everything that has arrived. It waits only if there is nothing to compute."""
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
                case AdapterRead():
                    self._adapters.put(event)
                case LinkClosed():
                    self._attempts.close_link(link)
                    self._feed.leave(link)
                case Drain():
                    self._attempts.drain(now=event.now)
                case Accept():
                    self._attempts.draining = False
                case Stop():
                    pass
                case _:
                    self._heed(link, event, now)

    def _heed(self, link: int, message: Message, now: float) -> None:
        """Handles a gateway's messages that are not requests. A malformed one is ignored, because nobody waits for its
        ending."""
        if fault := faults.of_other(message, self.runner.vocab_size):
            logger.warning("a message has %s: left aside", fault, extra={"event": "bad_message", "link": link})
            return
        match message:
            case ExtendLease():
                self._attempts.extend(link, message, now)
            case Cancel():
                self._attempts.cancel(link, message)
            case EngineAck() if self._journal is not None:
                self._journal.ack(message.seq)
            case CacheCommand(action="snapshot"):
                self._feed.subscribe(link, message.key)
            case CacheProbe():
                self._probe(link, message)
            case CacheCommand(action="unpin"):
                self.cache.unpin(message.region)
            case CacheCommand(action="drop"):
                self._purge(message.tenant)
            case AdapterCommand(action="unload"):
                self._adapters.unload(message.name)
            case _:
                pass

    def _probe(self, link: int, message: CacheProbe) -> None:
        identity: bytes | None = b""
        if message.adapter:
            adapter = self.runner.adapters.get(message.adapter)
            identity = None if adapter is None else adapter.identity
        wait_s = self.scheduler.wait_s()
        answer = probe(message, self.runner.root, identity, self.cache, wait_s)
        self._outbox.tell(link, answer)

    def _purge(self, tenant: str) -> None:
        """Drops what a tenant has in every tier. The cache drops it from the device and the host."""
        self.cache.purge(tenant)
        if (shared := self._attempts.shared) is not None:
            shared.purge(tenant)
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.forget()

    # --- one step ---

    def _plan(self, now: float) -> StepPlan:
        """Returns a plan of the sequences that may run in this step. It is empty if there is nothing to compute."""
        ahead, plan = len(self._pipeline) > 0, None
        for takes in self.failures.apart.turns(now, lambda: self.scheduler.all_running):
            plan = self.scheduler.plan(self._step, now, ahead=ahead, takes=takes)
            if plan.work:
                break
        assert plan is not None, "somebody always has a turn"
        return plan

    def _launch(self, plan: StepPlan) -> Exception | None:
        """Launches a plan. Returns what the runner, or the building of the plan's rows, raised, or None."""
        rows = list[Row]()
        failure = self._guarded(plan.step, lambda: rows.extend(self._rows.of(plan)))
        self.scheduler.launched(plan)
        self._step += 1
        if failure is not None:  # the plan's block tables are valid all the same
            self._guarded(plan.step, lambda: self._pipeline.copy(plan))
            return failure
        return self._guarded(plan.step, lambda: self._pipeline.launch(plan, rows))

    def _collect(self) -> bool:
        """Collects and commits the oldest step in flight. Returns False if it failed."""
        flight = self._pipeline.first()
        failure = self._guarded(flight.plan.step, lambda: self._pipeline.collect(flight))
        if failure is not None:
            self.failures.failed(flight.plan, failure, flight.void)
            return False
        record = self._commit.step(flight)
        if record.num_decode_seqs or record.num_prefill_tokens:  # not if all its rows were void
            self.scheduler.ran(record)
        record.commit_s = self._clock() - record.collected_at
        self._account(record)
        return True

    def _guarded(self, step: int, run: Callable[[], None]) -> Exception | None:
        """Runs a function and returns what it raised, if it did. A model may raise anything, and one bad step must not
        end a process."""
        try:
            run()
        except DeviceOutOfMemory as error:
            return error
        except Exception as error:
            logger.exception("step %d failed", step, extra={"event": "step_poisoned"})
            return error
        return None

    def _account(self, record: StepRecord) -> None:
        self._out.steps.append(record)
        self.totals.add(record)
        if record.num_decode_seqs:
            num_tokens = record.num_decode_seqs + record.num_accepted
            self._decode_rate.add(num_tokens, record.execute_s)

    # --- emit ---

    def _emit(self, now: float) -> StepOutput:
        """Returns the round's output. The journal is written first, because a killed worker must be able to prove
        everything that a gateway was sent."""
        touched, token_gaps = self._commit.take()
        if self._journal is not None:
            self._journal.count(touched)
            self._journal.flush()
        out, self._out = self._out, StepOutput(WorkerStatus(), 0)
        out.token_gaps = token_gaps
        out.num_out_of_memory, out.num_poisoned = self.failures.take_counts()
        out.messages = self._outbox.take(out.steps[-1].step if out.steps else self._step)
        out.messages += self._feed.take()
        out.adapters = self._adapters.take()
        out.ended, out.records = self._attempts.take_ended()
        out.status, out.num_attempts = self._status(), len(self.attempts)
        out.cache = self._watch.look(now, busy=self._busy or bool(self.attempts))
        if out.cache is not None:
            scheduler = self.scheduler
            out.occupancy = occupancy(scheduler.all_running, self.cache.block_size, scheduler.layout.num_dropped)
            out.queues = queue_figures(self.attempts.values(), self.scheduler, now)
        return out

    def _status(self) -> WorkerStatus:
        scheduler = self.scheduler
        return WorkerStatus(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            waiting_tokens=scheduler.num_waiting_tokens,
            free_blocks=self.cache.num_free,
            evictable_blocks=self.cache.num_evictable,
            prefill_rate=self.scheduler.forecast.per_second,
            decode_rate=self._decode_rate.per_second,
            draining=self._attempts.draining,
            cache_seq=self._feed.seq,
            disk_full=self._journal is not None and not self._journal.is_writable,
        )
