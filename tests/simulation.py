"""Scheduler, cache and engine in simulated time: a device whose steps take t = a + b * tokens + c * kv_tokens, and
whole histories (arrivals, late leases, cancels, a lost link, restarts of the worker) drawn from one seed.

Nothing here reads a clock or a global random state, so one seed is one history. `play(seed)` raises what is wrong with it.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import asdict

from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, generate_request

from workers.engine.engine import LinkClosed
from workers.engine.fcfs.policy import ArrivalAdmission
from workers.engine.scheduling.overtaking import Need
from workers.engine.sequences.sequence import Status
from workers.engine.values.plan import RowResult, SampledToken
from workers.protocol.messages import Cancel, ExtendLease

TEXT = encode("abcdefgh abcdefgh abcdefgh abcdefgh abcdefgh abcdefgh")
MAY_FAIL = ("too_long", "overloaded")


class PacedRunner(ScriptedRunner):
    """A scripted model on a device of known speed: `pace` is (a, b, c) in seconds."""

    def __init__(self, pace=(0.01, 0.0, 0.0), **options):
        super().__init__(**options)
        self.pace = pace
        self.elapse = lambda seconds: None

    def execute(self, rows):
        a, b, c = self.pace
        num_tokens = sum(len(row.tokens) for row in rows)
        self.elapse(a + b * num_tokens + c * sum(row.start for row in rows))
        results = super().execute(rows)
        self.steps.clear()
        return results


class BlindRunner(PacedRunner):
    """A runner of the same speed, but it looks at no KV and draws one letter for ever: for load, not for
    correctness."""

    def execute(self, rows):
        a, b, c = self.pace
        num_tokens = sum(len(row.tokens) for row in rows)
        self.elapse(a + b * num_tokens + c * sum(row.start for row in rows))
        return [RowResult(tuple(LETTER for _ in row.draws)) for row in rows]


LETTER = SampledToken(97)


def paced_driver(runner, **options):
    """A driver whose clock moves by what its steps take."""
    drive = Driver(runner, **options)

    def elapse(seconds):
        drive.now += seconds

    runner.elapse = elapse
    return drive


class Trace:
    """One history. `arrivals` say how many steps after the one before; `shape` is the worker."""

    def __init__(self, shape, arrivals, lose_link_at=None, restarts=()):
        self.shape = shape
        self.arrivals = arrivals
        self.lose_link_at = lose_link_at
        self.restarts = set(restarts)
        self.cancels = {}
        self.lost = False
        self.num_handed_over = 0
        self.tiers = Counter()
        """Blocks that were restored, swapped out and in, by all workers of the history."""
        self.drive = self._worker(1000.0)

    def _worker(self, now):
        shape = self.shape
        runner = PacedRunner(
            shape.get("pace", (0.0, 0.0, 0.0)),
            num_blocks=shape["num_blocks"],
            block_size=4,
            eos_every=shape["eos_every"],
        )
        drive = paced_driver(
            runner,
            lag=shape["lag"],
            device=shape["device"],
            host=self._host(),
            preempt=shape.get("preempt", "auto"),
            policy=shape.get("policy", "fair"),
            max_batch_tokens=shape["max_batch_tokens"],
            max_running=shape["max_running"],
            **shape.get("limits", {}),
        )
        drive.now = now
        drive.eos_every = shape["eos_every"]
        _watch_order(drive.scheduler)
        _watch_rows(drive.engine)
        if shape.get("policy") == "fcfs":
            watch_arrivals(drive.engine)
        if shape.get("host"):
            drive.cache.owners.offers.num_hits = shape["host"]["num_hits"]
        return drive

    def _host(self):
        """A fresh worker's host memory; its loads take as long as the seed says."""
        host = self.shape.get("host")
        if not host:
            return None
        rng = random.Random(host["seed"])
        return {
            "num_slots": host["num_slots"],
            "delay": lambda: rng.randint(0, host["max_delay"]),
            "seconds_per_block": host["seconds_per_block"],
        }

    def request(self, number, arrival):
        total = arrival["max_tokens"] * arrival["num_choices"]
        return generate_request(
            f"r{number}",
            (*TEXT[: arrival["length"]], 97 + arrival["variant"]),
            arrival["max_tokens"],
            tenant=arrival["tenant"],
            seed=number,
            temperature=float(number % 2),
            tier=arrival["tier"],
            num_choices=arrival["num_choices"],
            cache_write=arrival["cache_write"],
            lease_bound=min(total, arrival["first_lease"]) if total else 0,
            gather=arrival["num_choices"] == 1 and arrival.get("gather", number % 3 == 0),
        )

    def play(self, max_steps=4000):
        step = due = number = 0
        while number < len(self.arrivals) or not self.drive.idle:
            while number < len(self.arrivals) and due + self.arrivals[number]["after"] <= step:
                due += self.arrivals[number]["after"]
                self._arrive(step, number)
                number += 1
            if step in self.restarts:
                self._restart()
            self._gateway(step)
            self.drive.step()
            step += 1
            assert step < max_steps, "livelock"
        self._count_tiers()
        return self.drive

    def check(self):
        """Checks after `play` that each attempt ended with the tokens that it would have got alone."""
        drive = self.drive.check_idle()
        for (link, request_id), request in drive.requests.items():
            ending = drive.endings.get((link, request_id))
            if ending is None:
                assert link == 2 and self.lost
                continue
            failed = getattr(ending, "code", None)
            assert failed is None or failed in MAY_FAIL
            cancelled = self.arrivals[int(request_id[1:])]["cancel_after"] is not None
            exactly = failed is None and not cancelled
            handed = {index for index, _ in request.resume}
            for index in range(request.num_choices):
                if request.resume and index not in handed:
                    continue  # it ended before the restart, and was looked at there
                drive.check_alone(request, link=link, index=index, exactly=exactly)
                assert failed or (link, request_id, index) in drive.finishes

    def _arrive(self, step, number):
        arrival = self.arrivals[number]
        if self.lost and arrival["link"] == 2:
            return
        self.drive.send(self.request(number, arrival), link=arrival["link"])
        if arrival["cancel_after"] is not None:
            self.cancels.setdefault(step + arrival["cancel_after"], []).append((arrival["link"], number))

    def _gateway(self, step):
        for link, number in self.cancels.get(step, ()):
            self.drive.send(Cancel(f"r{number}", -1 if number % 2 else 0), link=link)
        if step == self.lose_link_at:
            self.lost = True
            self.drive.send(LinkClosed(), link=2)
        for (link, request_id), attempt in self.drive.engine.attempts.items():
            short = attempt.lease.left < attempt.message.num_choices
            if attempt.message.max_tokens and short and (step + attempt.serial) % 3 == 0:
                bound = attempt.lease.bound + 7
                self.drive.send(ExtendLease(request_id, attempt.lease.seq + 1, bound), link=link)

    def _restart(self):
        """The worker dies between two steps. Its gateways take what they heard to a fresh one."""
        old = self.drive
        self._count_tiers()
        self.drive = self._worker(old.now)
        for event in old.inbox:
            self.drive.send(event[1], link=event[0])
        for key, attempt in old.engine.attempts.items():
            self.num_handed_over += 1
            self.drive.send(self._handed_over(old, key, attempt), link=key[0])

    def _count_tiers(self):
        steps = [record for output in self.drive.outputs for record in output.steps]
        self.tiers["num_preempted"] += sum(record.num_preempted for record in steps)
        restores = self.drive.scheduler.restores
        if restores is not None:
            self.tiers += Counter(asdict(restores.counts))

    def _handed_over(self, old, key, attempt):
        request = old.requests[key]
        heard = {}
        for index in range(request.num_choices):
            before = dict(request.resume).get(index, ())
            heard[index] = (*before, *old.tokens[*key, index])
            if (*key, index) in old.finishes:
                old.check_alone(request, link=key[0], index=index, exactly=False)
        ended = {index for index in heard if (*key, index) in old.finishes}
        if request.resume:
            ended |= set(heard) - set(dict(request.resume))
        open_choices = tuple((i, tokens) for i, tokens in heard.items() if i not in ended)
        begun = bool(request.resume) or any(tokens for tokens in heard.values()) or bool(ended)
        spent = request.num_output_spent + sum(len(old.tokens[*key, index]) for index in range(request.num_choices))
        return _replaced(
            request,
            attempt=request.attempt + 1,
            resume=open_choices if begun else (),
            lease_bound=attempt.lease.bound,
            num_output_spent=spent,
        )


def _replaced(request, **changes):
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return type(request)(**(fields | changes))


def _watch_order(scheduler):
    """The earliest arrival is never preempted beside others, batch above its floor goes before interactive; nobody
    enters in a step that preempted, nor past the first of its tier, but what the law of `overtaking` lets pass."""
    preempt, enter, let_pass = scheduler.ranks.preempt, scheduler.admission._enter, scheduler.admission._pass
    heads = []

    def watched(sequence, now, cause, plan=None):
        tier = sequence.attempt.message.tier
        if plan is not None:
            assert not plan.ahead, "preempted while a step is in flight"
            running = scheduler.running[tier]
            assert sequence is not running[0] or len(running) == 1
            assert tier == "batch" or scheduler.ranks.batch_victim() is None
            assert all(sequence is not work.sequence for work in plan.work)
        preempt(sequence, now, cause, plan)

    def watched_entry(sequence, plan):
        tier = sequence.attempt.message.tier
        assert plan.num_preempted == 0, "admitted in a step that preempted"
        first = scheduler.preempted[tier][0] if scheduler.preempted[tier] else sequence
        head = heads[-1] if heads else sequence
        assert first in (head, sequence) and head.attempt.message.tier == tier
        if sequence is not head:
            assert not isinstance(scheduler.admission, ArrivalAdmission), "the first to come was overtaken"
            assert sequence.attempt.message.tenant != head.attempt.message.tenant
            assert scheduler.admission._overtaking[tier].allows(sequence, Need(head, 0, 0))
        enter(sequence, plan)

    def watched_pass(head, plan, crowd):
        heads.append(head)
        try:
            return let_pass(head, plan, crowd)
        finally:
            heads.pop()

    scheduler.ranks.preempt = watched
    scheduler.admission._enter, scheduler.admission._pass = watched_entry, watched_pass


def _watch_rows(engine):
    """Every row of a step has the whole of its sequence; who was preempted has nothing, once its last step is over."""
    scheduler, launched = engine.scheduler, engine.scheduler.launched

    def watched(plan):
        for sequence, num_tokens, _ in plan.work:
            assert sequence.status is Status.RUNNING
            assert not sequence.restoring
            end = scheduler.layout.place(sequence) + num_tokens
            assert len(sequence.block_ids) * engine.cache.block_size >= end, "partly resident"
        for attempt in engine.attempts.values():
            for sequence in attempt.sequences:
                if sequence.status is not Status.RUNNING and sequence.handle is None:
                    assert sequence.block_ids == []
                    assert sequence.num_computed == sequence.num_scheduled == 0
        launched(plan)

    scheduler.launched = watched


def watch_arrivals(engine, broken=None):
    """Checks that of a tier nobody enters, is dealt a chunk, or keeps its blocks before one that came earlier.
    `broken`: counts instead of raising."""
    scheduler = engine.scheduler
    preempt, enter = scheduler.ranks.preempt, scheduler.admission._enter
    shrink, deal = scheduler.shrink, scheduler.chunks.deal
    rows = []

    def law(holds, otherwise):
        if broken is not None:
            broken[otherwise] += not holds
        else:
            assert holds, otherwise

    def watched_preempt(sequence, now, cause, plan=None):
        tier = sequence.attempt.message.tier
        # Without a plan it is at its bound, or the latest row of a step that did not fit.
        beside = [s for s in rows if s.attempt.message.tier == tier] if plan is None else scheduler.running[tier]
        own = sequence.attempt.together(sequence)
        later = [s for s in beside if s.order > sequence.order and s not in own]
        law(all(s.status is not Status.RUNNING for s in later), "a later one keeps its blocks")
        preempt(sequence, now, cause, plan)

    def watched_shrink(plan, live):
        rows[:] = [work.sequence for work in live]
        lost = shrink(plan, live)
        rows.clear()
        return lost

    def watched_entry(sequence, plan):
        tier = sequence.attempt.message.tier
        wanting = [
            s
            for a in engine.attempts.values()
            for s in a.sequences
            if a.message.tier == tier and s.status in (Status.WAITING, Status.PREEMPTED)
        ]
        law(sequence is min(wanting, key=lambda s: s.order), "an earlier one waits")
        enter(sequence, plan)

    def watched_deal(plan, tier, prefills):
        num_rows = len(plan.work)
        deal(plan, tier, prefills)
        dealt = {work.sequence: work.num_tokens for work in plan.work[num_rows:]}
        by_arrival = iter(sorted(prefills, key=lambda s: s.order))
        for sequence in by_arrival:  # the last token may wait for a lease
            if sequence.num_unscheduled - dealt.get(sequence, 0) > 1:
                break
        law(all(s not in dealt for s in by_arrival), "a chunk before an earlier one's")

    scheduler.ranks.preempt, scheduler.admission._enter = watched_preempt, watched_entry
    scheduler.shrink, scheduler.chunks.deal = watched_shrink, watched_deal


# --- histories out of one number ---


def history(seed, policy="fair"):
    """The trace of a seed."""
    rng = random.Random(seed)
    shape = {
        "num_blocks": rng.randint(20, 60),
        "max_batch_tokens": rng.randint(4, 64),
        "max_running": rng.randint(3, 4),
        "eos_every": rng.choice([0, 13, 5]),
        "lag": rng.choice([0, 1, 1]),
        "pace": (rng.uniform(0.001, 0.02), rng.uniform(0, 2e-3), rng.uniform(0, 1e-5)),
        "device": {"max_step_tokens": rng.choice([None, None, None, None, 2, 7]), "late": rng.random() < 0.5},
        "host": rng.choice([None, _host_shape(rng), _host_shape(rng)]),
        "preempt": rng.choice(["auto", "recompute", "swap"]),
        "policy": policy,
    }
    arrivals = [_arrival(rng) for _ in range(rng.randint(1, 8))]
    if shape["host"] and rng.random() < 0.3:
        _crowd(rng, shape, arrivals)
    lose_link_at = rng.randint(0, 40) if rng.random() < 0.3 else None
    restarts = [rng.randint(1, 40) for _ in range(rng.choice([0, 0, 1, 1, 2]))]
    return Trace(shape, arrivals, lose_link_at, restarts)


def _crowd(rng, shape, arrivals):
    """Long prompts of one text come back after others took a small pool: what the host is for."""
    shape["num_blocks"] = rng.randint(20, 26)
    for number in range(rng.randint(4, 10)):
        again = {"length": 40, "variant": number % 2, "tenant": "AB"[number % 2]}
        arrivals.append(_arrival(rng) | again | {"after": rng.randint(3, 20), "cache_write": True})


def _host_shape(rng):
    return {
        "num_slots": rng.choice([1, 4, 12, 40, 100]),
        "max_delay": rng.choice([0, 0, 2, 5]),
        "seconds_per_block": rng.choice([0.0, 0.0, 1e-4, 1.0]),
        "seed": rng.random(),
        "num_hits": rng.choice([0, 0, 1, 2]),
    }


def _arrival(rng):
    return {
        "after": rng.randint(0, 4),
        "tenant": rng.choice("ABC"),
        "tier": rng.choice(["interactive", "interactive", "batch"]),
        "length": rng.randint(1, 40),
        "variant": rng.randint(0, 2),
        "max_tokens": rng.randint(0, 16),
        "num_choices": rng.choice([1, 1, 1, 2, 3]),
        "cache_write": rng.random() < 0.7,
        "link": rng.randint(1, 2),
        "first_lease": rng.randint(1, 30),
        "cancel_after": rng.choice([None, None, None, rng.randint(0, 12)]),
        "gather": rng.choice([0, 0, 0, rng.randint(1, 800)]) > 0,  # drawn so that a seed is still the history it was
    }


def play(seed, policy="fair"):
    """Plays and checks the history of a seed; returns what it did, for comparing two runs."""
    trace = history(seed, policy)
    drive = trace.play()
    trace.check()
    endings = {key: (type(e).__name__, e.usage) for key, e in sorted(drive.endings.items())}
    counts = trace.tiers + Counter(num_handed_over=trace.num_handed_over)
    return drive.now, len(drive.outputs), dict(drive.tokens), endings, counts


def play_all(chosen, policy="fair"):
    """Returns how many sequences were preempted, how many handed over to a fresh worker, and what went through the tiers."""
    counts = Counter()
    for seed in chosen:
        try:
            counts += play(seed, policy)[-1]
        except Exception as error:  # raised again: only told how to play it once more
            error.add_note(f"replay: HEADGATE_SIMULATION_SEED={seed}")
            raise
    return counts


CHUNK = 100
"""Small enough for a busy machine to play within the time limit of a test."""


def seeds(start, stop, chunk):
    told = os.environ.get("HEADGATE_SIMULATION_SEED")
    return [[int(told)]] if told else [range(i, i + chunk) for i in range(start, stop, chunk)]


def name_of(chosen):
    return f"from-{chosen[0]}"


__all__ = [
    "CHUNK",
    "LINK",
    "TEXT",
    "BlindRunner",
    "PacedRunner",
    "Trace",
    "history",
    "name_of",
    "paced_driver",
    "play",
    "play_all",
    "seeds",
    "watch_arrivals",
]
