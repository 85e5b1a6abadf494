"""Plan of the next step: which sequence computes which tokens. The module is pure: values in, a plan out, and the cache
is the only other object that it changes.

Of each tier, interactive before batch, a plan takes decodes first: one token each, or in turns where a step has no time
for all. Then it admits what fits, and deals the rest of the token budget over all prefills in equal shares. Blocks for
a whole uncached prompt are taken at admission, those for output one by one. When one is missing, the latest arrival
loses its own. Its tokens are computed again later, except for what it had committed, which stays in the tree.

A step is counted twice. `launched` moves what the next plan builds on: positions scheduled, draws pending. `advance`
moves what is known: positions computed, tokens in the tree. A plan may be made ahead, with a step in flight whose
tokens are unknown. The bounds of length, lease and context are known all the same. Only an end token is not, and then
one row too many is dropped (`drop`). `retract` takes back what a failed step did.

The scheduler cannot deadlock, for these reasons. A sequence that runs alone always fits, because `Limits.max_len` is at
most what the pool holds beside its pins. The earliest sequence of a tier is never preempted for a later one. Nothing of
a tier is admitted while a preempted one waits. A plan that lacks blocks while a step is in flight is made again when
that step is collected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from operator import attrgetter

from cache.prefix_cache import PrefixCache
from cache.tree.handle import Probe
from workers.engine.queueing.deferral import Deferral
from workers.engine.queueing.fairness import VirtualCounters
from workers.engine.queueing.floor import BatchFloor
from workers.engine.queueing.forecast import Forecast, Load, Queued
from workers.engine.queueing.overload import Arrival
from workers.engine.queueing.pace import TokenBudget
from workers.engine.queueing.turns import in_turn
from workers.engine.scheduling.block_tables import BlockTables
from workers.engine.scheduling.policy import POLICIES, Policy
from workers.engine.scheduling.sequence_queues import TIERS, SequenceQueues
from workers.engine.scheduling.speculation import Speculation
from workers.engine.scheduling.step_plan import FILL_PART, Limits, StepPlan, Work
from workers.engine.sequences.sequence import Attempt, Sequence, Status
from workers.engine.sequences.sparsity import Sparsity
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
        sparsity: Sparsity | None = None,
        policy: Policy = "fair",
    ) -> None:
        parts = POLICIES[policy]
        self.cache = cache
        self.limits = limits
        self.counters = VirtualCounters(CREDIT_STEPS * limits.max_batch_tokens)
        self.budget = TokenBudget(limits.max_batch_tokens, limits.token_gap_s)
        self.floor = BatchFloor(limits.max_running)
        self.forecast = Forecast(self.budget)
        self.restores = None if host is None else Restores(cache, host, self.forecast, preempt)
        self.block_tables = BlockTables(cache, limits.max_running, self.restores)
        self.deferral = Deferral(cache)
        waiting = {tier: parts.queue(self.counters, self._look, lambda: self.budget.num_tokens) for tier in TIERS}
        self.ranks = SequenceQueues(self.block_tables, waiting, self.deferral, self.floor)
        self.admission = parts.admission(self.ranks, self.block_tables, self.deferral, self.counters, limits, sparsity)
        self.chunks = parts.chunks(self.ranks, self.counters, self.budget)
        self.sparsity = sparsity
        self._growth = parts.growth(self.ranks, self.block_tables, self.counters, sparsity)
        self.overload = parts.overload(self.counters)
        self.speculation: Speculation | None = None
        self._num_preempted_before = 0
        self._num_cached_before = 0
        self._num_kv_tokens = 0
        self._busy_at = 0.0
        """Time when a sequence last ran or waited, as far as plans and steps show."""

    def _look(self, sequence: Sequence) -> Probe:
        """Returns how far the tree matches a waiting sequence, and the key of the first block that it misses."""
        attempt = sequence.attempt
        if not attempt.message.cache_read or attempt.wants_prompt_logprobs:
            return Probe(0, None)
        return self.cache.probe(attempt.path, sequence.tokens)

    # --- attempts begin, get messages from their gateway, end ---

    def refuse(self, attempt: Attempt, now: float) -> float:
        """Returns the seconds after which the request should come again, if its first token would come too late now, or
        0 if it is let in. A request that continues from another worker is not refused, nor is a fill of a public
        prompt, nor batch, which has time, nor any request while nobody runs or waits."""
        message, waiting = attempt.message, self.ranks.waiting["interactive"]
        limit_s = min(self.limits.ttft_s, attempt.deadline - now)
        is_idle = self.num_running + self.num_waiting == 0
        if is_idle and now - self._busy_at >= REST_S:
            self.budget.step_time.rest()
            self.overload.rest()
        if message.tier == "batch" or message.resume or message.max_tokens == 0:
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
        num_tokens = len(sequence.tokens) - self._look(sequence).num_tokens
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
            sum(s.num_unscheduled for s in running if not s.output),
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

    def release(self, attempt: Attempt) -> None:
        """Queues the sequences of an attempt that waited for a grammar or for shared KV, and waits no more."""
        for sequence in attempt.sequences:
            sequence.status = Status.WAITING
            self.ranks.add(sequence)

    def extend(self, attempt: Attempt, message: ExtendLease, now: float) -> None:
        self.ranks.extend(attempt, message, now)

    def end(self, sequence: Sequence) -> None:
        if sequence.output and sequence.attempt.message.tier == "interactive":
            self.forecast.answered(len(sequence.output))
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
        self.admission.tick(now)
        if self.num_running or self.num_waiting:
            self._busy_at = now
        plan = StepPlan(
            step,
            now,
            self.budget.pace(self._num_kv_tokens, hurried=self.ranks.present("interactive")),
            self.budget.slack,
            ahead,
            takes=takes,
            num_preempted=self._num_preempted_before,
            num_cached_tokens=self._num_cached_before,
        )
        self._num_preempted_before = self._num_cached_before = 0
        for sequence in self.admission.take_restored(plan):
            self._publish(sequence)
        self._plan_interactive(plan)
        num_rows = len(plan.work)
        self._plan_batch(plan)
        if self.speculation is not None:
            try:
                self.speculation.extend(plan)
            except Exception:  # a plan is complete without guesses
                logger.exception("nothing is guessed", extra={"event": "guesses_failed"})
        self._count(plan, num_rows)
        if self.restores is not None:
            self.restores.flush()
        return plan

    def _plan_interactive(self, plan: StepPlan) -> None:
        below = self.ranks.present("batch") and self.floor.due
        if below:
            self.admission.admit_below_floor(plan)
        prefills = self._plan_decodes(plan, "interactive")
        self.admission.admit(plan, "interactive", prefills)
        reserve = self.floor.reserve(plan.budget) if below else 0
        plan.budget -= reserve
        num_rows = len(plan.work)
        self.chunks.deal(plan, "interactive", prefills)
        if len(plan.work) > num_rows:  # a sequence waits for its first token, until this step ends
            plan.budget, plan.short = 0, True
        plan.budget += reserve

    def _plan_batch(self, plan: StepPlan) -> None:
        """Plans batch with what is left over. A step with interactive prompts leaves batch its floor alone, and one
        with interactive streams leaves it a part, so that arrivals do not wait for long."""
        if plan.work:
            plan.keep_short()
        prefills = self._plan_decodes(plan, "batch")
        if not self.ranks.wanted("interactive"):
            self.admission.admit(plan, "batch", prefills)
        self.chunks.deal(plan, "batch", prefills)

    def _count(self, plan: StepPlan, num_interactive: int) -> None:
        """Counts the plan's tokens. Rows of the interactive tier come first in a plan."""
        interactive, batch = (
            (sum(work.num_tokens for work in works), sum(work.num_draws for work in works))
            for works in (plan.work[:num_interactive], plan.work[num_interactive:])
        )
        self.floor.count(plan.now, batch, interactive)
        plan.num_tokens = interactive[0] + batch[0]
        plan.num_kv_tokens = sum(work.sequence.place for work in plan.work)
        self._num_kv_tokens = plan.num_kv_tokens

    def _plan_decodes(self, plan: StepPlan, tier: Tier) -> list[Sequence]:
        """Plans the decodes of a tier. Returns its running sequences that are in prefill."""
        prefills: list[Sequence] = []
        most_rows, sequences = self._rows(plan, tier)
        for sequence in sequences:
            if sequence.status is not Status.RUNNING:
                continue  # preempted for an earlier one, just now
            if sequence.restoring or plan.excludes(sequence):
                continue
            attempt = sequence.attempt
            position, pending = sequence.num_scheduled, sequence.num_pending
            num_left = len(sequence.tokens) + pending - position
            if num_left != 1 or not (pending or sequence.output):
                if num_left:
                    prefills.append(sequence)
                continue
            if pending and position + 1 >= attempt.end_len:
                continue  # whatever the pending token is, nothing follows it
            lease = attempt.lease
            if lease.bound - lease.spent - lease.in_flight < lease.stride:
                self.ranks.park(attempt, plan.now, plan.step)
                continue
            if plan.budget == 0 or len(plan.work) >= most_rows:
                continue
            if attempt.search is not None:
                if sequence is attempt.sequences[0]:
                    self._plan_beams(plan, attempt)
                continue
            forked = len(attempt.sequences) > 1
            if forked and plan.ahead and self._ends_decide_turns(attempt):
                continue
            if self._growth.is_due(sequence) and not self._growth.take([sequence], plan):
                continue
            plan.holds_next |= attempt.needs_last_token
            lease.in_flight += 1
            plan.budget -= 1
            plan.work.append(Work(sequence, 1, 1))
        return sorted((s for s in prefills if s.status is Status.RUNNING), key=attrgetter("order"))

    def _rows(self, plan: StepPlan, tier: Tier) -> tuple[int, Seq[Sequence]]:
        """Returns the number of rows that the plan may have, and the running sequences in the order in which they get
        rows. In a step for which an interactive sequence waits, batch gets a part of the rows, whatever the streams
        take."""
        running = tuple(self.ranks.running[tier])
        if not self.ranks.present("interactive"):
            return self.limits.max_batch_tokens, running
        most, num_before = self.budget.num_rows(_mean_place(running)), len(plan.work)
        if tier == "batch":
            most = max(most, num_before + max(1, most // FILL_PART))
        return most, running if num_before + len(running) <= most else in_turn(running)

    def _plan_beams(self, plan: StepPlan, attempt: Attempt) -> None:
        """Plans all beams of a search or none, because which of them go on is decided over all. The next plan needs the
        decision."""
        beams = attempt.sequences
        if not all(s.status is Status.RUNNING and s.decoding and not s.restoring for s in beams):
            return  # after a preemption, until the last of them is where it was
        if len(beams) > plan.budget and plan.work:
            return
        needing = [beam for beam in beams if self._growth.is_due(beam)]
        if needing and not self._growth.take(needing, plan):
            return
        plan.holds_next = True
        attempt.lease.in_flight += len(beams)
        plan.budget = max(0, plan.budget - len(beams))
        plan.work += [Work(beam, 1, 1) for beam in beams]

    def _ends_decide_turns(self, attempt: Attempt) -> bool:
        """Returns whether endings decide which choices draw. Fewer tokens are left than choices run, so the lowest
        indices go first. Which choices these are is known when the step in flight has shown which ones ended."""
        lease = attempt.lease
        num_pending = sum(s.num_pending for s in attempt.sequences)
        num_running = sum(s.status is Status.RUNNING for s in attempt.sequences)
        return num_pending > 0 and lease.bound - lease.spent - num_pending < num_running

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
        if num_prefill < num_tokens:
            record.num_decode_seqs += 1
        if num_prefill:
            attempt = sequence.attempt
            num_fresh = attempt.account.compute(start, start + num_prefill)
            attempt.num_recomputed += num_prefill - num_fresh
            record.num_prefill_tokens += num_prefill
            record.num_recomputed += num_prefill - num_fresh
        if end // self.cache.block_size > sequence.num_offered_blocks:
            self._publish(sequence)
        return num_prefill

    def _publish(self, sequence: Sequence) -> None:
        keys = self.block_tables.publish(sequence)
        if not sequence.output:
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
        self.retract(work)
        record.num_lag_discarded += work.num_tokens

    def retract(self, work: Work) -> None:
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
        """Gives back what the step used. It is called after the step's last `advance`, `drop` or `retract`."""
        self.block_tables.collected(step)

    # --- a step that was too large for the device ---

    def shrink(self, plan: StepPlan, live: list[Work]) -> Sequence | None:
        """Makes steps smaller for a while and preempts the latest arrivals of this one, batch first. `live` are its
        rows that are still wanted. Returns the sequence that cannot run at all, if one token of it was too much."""
        num_tokens = sum(work.num_tokens for work in plan.work)
        self.budget.cut(num_tokens)
        self._num_preempted_before += plan.num_preempted
        self._num_cached_before += plan.num_cached_tokens
        first = live[0].sequence
        if num_tokens == 1 or (first.in_search and num_tokens <= len(first.attempt.sequences)):
            return first
        left = [work for work in live if work.sequence.status is Status.RUNNING]
        left.sort(key=lambda w: (TIERS.index(w.sequence.attempt.message.tier), w.sequence.order))
        num_lost = 0
        while len(left) > 1 and num_lost < num_tokens - self.budget.num_tokens:
            work = left.pop()
            num_lost += work.num_tokens
            if work.sequence.status is Status.RUNNING:  # another beam may have been preempted with it just now
                self.ranks.preempt(work.sequence, plan.now)
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


def _mean_place(sequences: Seq[Sequence]) -> float:
    return sum(sequence.place for sequence in sequences) / max(1, len(sequences))
