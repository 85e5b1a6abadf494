"""Sequences from their arrival to their end, and the plan of each step between. The module is pure: values in, a plan
out, and the cache is the only other object that it changes.

`batching` says which sequence computes which tokens. Blocks for a whole uncached prompt are taken at admission, those
for output one by one. When one is missing, the latest arrival loses its own. Its tokens are computed again later,
except for what it had committed, which stays in the tree.

A step is counted twice. `launched` moves what the next plan builds on: positions scheduled, draws pending. `advance`
moves what is known: positions computed, tokens in the tree. A plan may be made ahead, with a step in flight whose
tokens are unknown. The bounds of length, lease and context are known all the same. Whether a token ends its sequence is
not: then one row too many was planned, and it is dropped (`drop`). `undo` takes back what a failed step did.

The scheduler cannot deadlock, for these reasons. A sequence that runs alone always fits, because `Limits.max_len` is at
most what the pool holds without its pins. The earliest sequence of a tier is never preempted for a later one. Those
that enter before one that waits for room are bounded, and end. A plan that lacks blocks while a step is in flight is
made again when that step is collected. A sequence that has to wait because another one has a row comes to be the first
of its tier to ask, and then nobody of the tier has one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from cache.prefix_cache import PrefixCache
from cache.tree.handle import Probe
from workers.engine.queueing.deferral import Deferral
from workers.engine.queueing.fairness import VirtualCounters
from workers.engine.queueing.floor import BatchFloor
from workers.engine.queueing.forecast import Forecast, Load, Queued
from workers.engine.queueing.overload import Arrival
from workers.engine.queueing.pace import TokenBudget
from workers.engine.scheduling.batching import Batching
from workers.engine.scheduling.block_tables import BlockTables
from workers.engine.scheduling.kv_layout import KVLayout, WholeLayout
from workers.engine.scheduling.policy import FAIR, Policy
from workers.engine.scheduling.sequence_queues import TIERS, SequenceQueues
from workers.engine.scheduling.speculation import Speculation
from workers.engine.scheduling.step_plan import Limits, StepPlan, Work
from workers.engine.sequences.sequence import Attempt, Sequence, Status
from workers.engine.tiers.restores import Preempt, Restores
from workers.engine.values.host_port import HostBlocks
from workers.engine.values.record import StepRecord
from workers.protocol.messages import ExtendLease, Tier

logger = logging.getLogger(__name__)

CREDIT_STEPS = 8
"""Number of token budgets by which a tenant that was idle may be ahead of the others."""

REST_S = 1.0
"""Seconds without work after which a worker rests. The requests that come afterwards are another load. Under a load
that it cannot serve a worker never has so long a pause."""


class Scheduler:
    def __init__(
        self,
        cache: PrefixCache,
        limits: Limits,
        host: HostBlocks | None = None,
        preempt: Preempt = "auto",
        layout: KVLayout | None = None,
        policy: Policy = FAIR,
    ) -> None:
        self.cache = cache
        self.limits = limits
        self.counters = VirtualCounters(CREDIT_STEPS * limits.max_batch_tokens)
        self.budget = TokenBudget(limits.max_batch_tokens, limits.token_gap_s)
        self.floor = BatchFloor(limits.max_running)
        self.forecast = Forecast(self.budget)
        self.restores = None if host is None else Restores(cache, host, self.forecast, preempt)
        self.layout = WholeLayout() if layout is None else layout
        self.block_tables = BlockTables(cache, limits.max_running, self.layout, self.restores)
        self.deferral = Deferral(cache)
        waiting = {tier: policy.queue(self.counters, self._look, lambda: self.budget.num_tokens) for tier in TIERS}
        self.ranks = SequenceQueues(self.block_tables, waiting, self.deferral, self.floor)
        self.admission = policy.admission(self.ranks, self.block_tables, self.deferral, self.counters, limits)
        self.chunks = policy.chunks(self.ranks, self.counters, self.budget)
        self.growth = policy.growth(self.ranks, self.block_tables, self.counters)
        self._batching = Batching(self.ranks, self.admission, self.chunks, self.growth, self.layout, self.budget)
        self.overload = policy.overload(self.counters)
        self.speculation: Speculation | None = None
        self._num_preempted_before = 0
        self._num_cached_before = 0
        self._num_kv_tokens = 0
        self._busy_at = 0.0
        """Time when a sequence last ran or waited, as far as plans and steps show."""

    def _look(self, sequence: Sequence) -> Probe:
        """Returns how far the tree matches a waiting sequence, and the key of the first block that it misses."""
        attempt = sequence.attempt
        if not attempt.reads_cache:
            return Probe(0, None)
        return self.cache.probe(attempt.path, sequence.tokens)

    # --- attempts begin, get messages from their gateway, end ---

    def refuse(self, attempt: Attempt, now: float) -> float:
        """Returns the seconds after which the request should come again, if its first token would come too late now, or
        0 if it is let in. A request that comes from a lost worker is not refused, nor is a fill of a public prompt, nor
        batch, which has time, nor any request while nobody runs or waits."""
        message, waiting = attempt.message, self.ranks.waiting["interactive"]
        limit_s = self.limits.ttft_s
        is_idle = self.num_running + self.num_waiting == 0
        if is_idle and now - self._busy_at >= REST_S:
            self.budget.step_time.rest()
            self.overload.rest()
        is_fill = message.max_tokens == 0 and attempt.inputs is None
        if message.tier == "batch" or message.attempt or is_fill:
            return 0.0
        if is_idle:
            self.overload.claim(message.tenant, hash(attempt.prompt.tobytes()))
            return 0.0
        load = self._load()
        most = Queued(waiting.num_uncached, len(waiting)).plus(self.overload.kept)
        if self.forecast.wait_s(most, load) <= limit_s:
            if self.overload.kept.num_sequences:
                self.overload.claim(message.tenant, hash(attempt.prompt.tobytes()))
            return 0.0
        sequence = attempt.sequences[0]
        num_tokens = len(attempt.prompt) - self._look(sequence).num_tokens
        arrival = Arrival(message.tenant, message.weight, num_tokens, hash(attempt.prompt.tobytes()), limit_s)
        return self.overload.refuse(arrival, waiting.queued, now, lambda ahead: self.forecast.wait_s(ahead, load))

    def wait_s(self) -> float:
        """Returns the seconds that a request would wait that came now and let all others in the queue go first."""
        waiting = self.ranks.waiting["interactive"]
        return self.forecast.wait_s(Queued(waiting.num_uncached, len(waiting)), self._load())

    def _load(self) -> Load:
        """Returns the present load. Batch gives way, so its running slots count as free."""
        running = self.ranks.running["interactive"]
        return Load(
            len(running),
            sum(s.num_unscheduled for s in running if not s.decoding),
            max(1, len(running)) if self.admission.is_full else self.limits.max_running,
            self._num_kv_tokens,
        )

    def add(self, attempt: Attempt) -> None:
        """Adds an attempt and queues its sequences, except those that wait for a grammar or for shared KV. `release`
        queues these."""
        self.counters.enter(attempt.message.tenant, attempt.message.weight)
        for sequence in attempt.sequences:
            if sequence.status is Status.WAITING:
                self.ranks.add(sequence)

    def add_input(self, sequence: Sequence) -> None:
        """Queues a further input of an attempt."""
        self.ranks.add(sequence)

    def release(self, attempt: Attempt) -> None:
        """Queues the sequences of an attempt that waited for a grammar or for shared KV, and waits no more. Some of
        them may have been cancelled meanwhile."""
        for sequence in attempt.sequences:
            if sequence.status in (Status.COMPILING, Status.FETCHING):
                sequence.status = Status.WAITING
                self.ranks.add(sequence)

    def extend(self, attempt: Attempt, message: ExtendLease, now: float) -> None:
        self.ranks.extend(attempt, message, now)

    def end(self, sequence: Sequence) -> None:
        if sequence.output and sequence.attempt.message.tier == "interactive":
            self.forecast.answered(len(sequence.output))
        if self.speculation is not None:
            self.speculation.leave(sequence)
        self.ranks.end(sequence)

    def leave(self, attempt: Attempt) -> None:
        """Removes an attempt after the last of its sequences ended."""
        self.ranks.leave(attempt)
        if attempt.charged:
            num_left = attempt.account.num_tokens - attempt.account.num_seen
            self.counters.refund(attempt.message.tenant, computed=num_left)
        self.counters.leave(attempt.message.tenant)

    def expire(self, now: float) -> list[Attempt]:
        """Returns parked attempts that have to be ended, because the gateway sent nothing for too long."""
        return self.ranks.expire(now, self.limits)

    # --- the plan of a step ---

    def plan(
        self, step: int, now: float, *, ahead: bool = False, takes: Callable[[Sequence], bool] | None = None
    ) -> StepPlan:
        """Plans a step. Between a plan and its `launched` nothing else may change the scheduler. `takes` selects the
        sequences that may take part."""
        plan = self._begin(step, now, ahead, takes)
        for sequence in self.admission.take_restored(plan):
            self._publish(sequence, in_prefill=not sequence.decoding)
        self._batching.add_interactive(plan)
        num_interactive = len(plan.work)
        self._batching.add_batch(plan)
        if self.speculation is not None:
            self._speculate(plan, self.speculation)
        self._count(plan, num_interactive)
        if self.restores is not None:
            self.restores.flush()
        return plan

    def _begin(self, step: int, now: float, ahead: bool, takes: Callable[[Sequence], bool] | None) -> StepPlan:
        """Returns an empty plan with the step's token budget. A plan that failed hands its counts on to this one."""
        self.admission.begin_plan(now)
        if self.num_running or self.num_waiting:
            self._busy_at = now
        budget = self.budget.pace(self._num_kv_tokens, hurried=self.ranks.present("interactive"))
        num_preempted, num_cached_tokens = self._num_preempted_before, self._num_cached_before
        self._num_preempted_before = self._num_cached_before = 0
        return StepPlan(
            step,
            now,
            budget,
            self.budget.slack,
            ahead,
            takes=takes,
            num_preempted=num_preempted,
            num_cached_tokens=num_cached_tokens,
        )

    def _speculate(self, plan: StepPlan, speculation: Speculation) -> None:
        try:
            speculation.extend(plan)
        except Exception:  # a plan is complete without guesses
            logger.exception("nothing is guessed", extra={"event": "guesses_failed"})

    def _count(self, plan: StepPlan, num_interactive: int) -> None:
        """Counts the plan's tokens. Rows of the interactive tier come first in a plan."""
        interactive, batch = (
            (sum(work.num_tokens for work in works), sum(work.num_draws for work in works))
            for works in (plan.work[:num_interactive], plan.work[num_interactive:])
        )
        self.floor.count(plan.now, batch, interactive)
        plan.num_tokens = interactive[0] + batch[0]
        plan.num_kv_tokens = sum(self.layout.place(work.sequence) for work in plan.work)
        self._num_kv_tokens = plan.num_kv_tokens

    # --- the step goes to the device, and comes back ---

    def launched(self, plan: StepPlan) -> None:
        """Records that the step was launched. From here on the next step may be planned."""
        self.block_tables.launched(plan.step)
        for sequence, num_tokens, num_draws in plan.work:
            sequence.num_scheduled += num_tokens
            sequence.num_pending += num_draws
            sequence.last_step = plan.step

    def advance(self, work: Work, record: StepRecord) -> int:
        """Counts `work`, whose KV is written, and publishes the blocks it filled. Returns the number of its tokens that
        were prefill."""
        sequence, num_tokens, num_draws = work
        start = sequence.num_computed
        end = sequence.num_computed = start + num_tokens
        sequence.num_pending -= num_draws
        # The token drawn last counts as decode. All other tokens are prefill, be it of the prompt or of what was lost.
        num_prefill = num_tokens - 1 if sequence.output and end == len(sequence.tokens) else num_tokens
        attempt = sequence.attempt
        if num_prefill < num_tokens:
            record.num_decode_seqs += 1
        if attempt.message.tier == "batch":
            record.num_batch_prefill_tokens += num_prefill
            record.num_batch_decode_tokens += num_tokens - num_prefill
        if num_prefill:
            num_fresh = sequence.account.compute(start, start + num_prefill)
            attempt.num_recomputed += num_prefill - num_fresh
            record.num_prefill_tokens += num_prefill
            record.num_recomputed += num_prefill - num_fresh
        if end // self.cache.block_size > sequence.num_offered_blocks:
            self._publish(sequence, in_prefill=num_prefill > 0)
        return num_prefill

    def _publish(self, sequence: Sequence, *, in_prefill: bool) -> None:
        keys = self.block_tables.publish(sequence)
        if in_prefill:
            self.deferral.lead(sequence)
        for waiting in self.ranks.waiting.values():
            waiting.committed(keys)

    def fork(self, sequence: Sequence, indices: list[int]) -> list[Sequence]:
        """Returns the choices that continue from a finished prefill. The sequence that carried them comes first."""
        # Draws may have moved the carrier after others of its attempt, never after another arrival.
        sequence.take_index(indices[0])
        children = []
        for index in indices[1:]:
            child = self.branch(sequence, index)
            sequence.attempt.sequences.append(child)
            children.append(child)
        return [sequence, *children]

    def branch(self, sequence: Sequence, index: int) -> Sequence:
        """Returns another sequence that continues from the same position and runs."""
        child = self.block_tables.fork(sequence, index)
        self.ranks.run(child)
        return child

    def reject(self, work: Work, num_kept: int) -> None:
        """Keeps only the first `num_kept` tokens of a row with proposals. What the row wrote after them is written
        again before anybody reads it."""
        sequence, num_lost = work.sequence, work.num_draws - num_kept
        sequence.num_scheduled -= num_lost
        sequence.num_pending -= num_lost
        sequence.attempt.lease.in_flight -= num_lost

    def drop(self, work: Work, record: StepRecord) -> None:
        """Discards the result of a row that nobody wants any more. It is neither billed nor charged."""
        self.undo(work)
        record.num_lag_discarded += work.num_tokens

    def undo(self, work: Work) -> None:
        """Takes the row out of the step's effects: nothing was computed, nothing drawn."""
        sequence = work.sequence
        sequence.num_pending -= work.num_draws
        sequence.attempt.lease.in_flight -= work.num_draws
        sequence.num_scheduled = sequence.num_computed

    def ran(self, record: StepRecord) -> None:
        """Learns how long a step took that computed something."""
        self._busy_at = record.collected_at
        self.budget.step_ran(record.num_tokens, record.num_kv_tokens, record.execute_s)

    def collected(self, step: int) -> None:
        """Gives back what the step used. It is called after the step's last `advance`, `drop` or `undo`."""
        self.block_tables.collected(step)

    # --- a step that was too large for the device ---

    def shrink(self, plan: StepPlan, live: list[Work]) -> Sequence | None:
        """Makes steps smaller for a while and preempts the latest arrivals of this one, batch first. `live` are its
        rows that are still wanted. Returns the sequence that cannot run at all, if the least of it that can run was too
        much."""
        num_tokens = sum(work.num_tokens for work in plan.work)
        self.budget.cut(num_tokens)
        self._num_preempted_before += plan.num_preempted
        self._num_cached_before += plan.num_cached_tokens
        first = live[0].sequence
        is_least = num_tokens == 1 or (len(live) == 1 and first.attempt.is_whole)
        if is_least or (first.in_gang and num_tokens <= len(first.attempt.sequences)):
            return first
        left = [work for work in live if work.sequence.status is Status.RUNNING]
        left.sort(key=lambda w: (TIERS.index(w.sequence.attempt.message.tier), w.sequence.order))
        num_lost = 0
        while len(left) > 1 and num_lost < num_tokens - self.budget.num_tokens:
            work = left.pop()
            num_lost += work.num_tokens
            if work.sequence.status is Status.RUNNING:  # another of its gang may have been preempted with it just now
                self.ranks.preempt(work.sequence, plan.now, "memory")
            self._num_preempted_before += 1
        return None

    # --- figures ---

    @property
    def running(self) -> dict[Tier, list[Sequence]]:
        return self.ranks.running

    @property
    def all_running(self) -> list[Sequence]:
        return [sequence for tier in TIERS for sequence in self.ranks.running[tier]]

    @property
    def preempted(self) -> dict[Tier, list[Sequence]]:
        return self.ranks.preempted

    @property
    def num_running(self) -> int:
        return self.ranks.num_running

    @property
    def num_waiting(self) -> int:
        return self.ranks.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Number of tokens of prompts that never ran."""
        return self.ranks.num_waiting_tokens
