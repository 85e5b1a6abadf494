"""Random traces through the real scheduler, cache and engine with a scripted model: nothing deadlocks, nothing leaks,
every token is the one the request would have got alone, and the books agree with the steps."""

from __future__ import annotations

from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, generate_request
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from workers.engine.engine import LinkClosed
from workers.protocol.messages import Cancel, ExtendLease

TEXT = encode("abcdefgh abcdefgh abcdefgh abcdefgh abcdefgh abcdefgh")

arrivals = st.fixed_dictionaries(
    {
        "after": st.integers(0, 4),
        "tenant": st.sampled_from("ABC"),
        "tier": st.sampled_from(["interactive", "interactive", "batch"]),
        "length": st.integers(1, 40),
        "variant": st.integers(0, 2),
        "max_tokens": st.integers(0, 24),
        "num_choices": st.sampled_from([1, 1, 2, 3]),
        "cache_write": st.booleans(),
        "link": st.integers(1, 2),
        "first_lease": st.integers(1, 30),
        "cancel_after": st.sampled_from([None, None, None, 1, 3, 9]),
    }
)
shapes = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(20, 60),
        "max_batch_tokens": st.integers(4, 64),
        "max_running": st.integers(3, 4),
        "eos_every": st.sampled_from([0, 13, 5]),
        "lag": st.sampled_from([0, 1, 1]),
        "device": st.fixed_dictionaries(
            {
                "max_step_tokens": st.sampled_from([None, None, None, 1, 2, 3, 7]),
                "late": st.booleans(),
            }
        ),
    }
)


class Trace:
    """One random history: arrivals, a gateway that extends leases late, cancels, one lost link."""

    def __init__(self, shape, arrivals, lose_link_at):
        runner = ScriptedRunner(
            num_blocks=shape["num_blocks"], block_size=4, eos_every=shape["eos_every"]
        )
        self.drive = Driver(
            runner,
            lag=shape["lag"],
            device=shape["device"],
            max_batch_tokens=shape["max_batch_tokens"],
            max_running=shape["max_running"],
        )
        self.drive.eos_every = shape["eos_every"]
        self.arrivals = arrivals
        self.lose_link_at = lose_link_at
        self.cancels = {}
        self.lost = False
        self._watch_victims()

    def _watch_victims(self):
        """The earliest arrival is never preempted beside others, batch above its floor goes before interactive; nobody enters in a
        step that preempted, nor past one of its tier that was preempted."""
        scheduler = self.drive.scheduler
        preempt = scheduler.ranks.preempt

        def watched(sequence, now, plan=None):
            tier = sequence.attempt.message.tier
            if plan is not None:
                assert not plan.ahead, "preempted while a step is in flight"
                running = scheduler.running[tier]
                assert sequence is not running[0] or len(running) == 1
                assert tier == "batch" or scheduler.ranks.batch_victim() is None
                assert all(sequence is not work.sequence for work in plan.work)
            preempt(sequence, now, plan)

        enter = scheduler.admission._enter

        def watched_entry(sequence, plan):
            tier = sequence.attempt.message.tier
            assert plan.num_preempted == 0, "admitted in a step that preempted"
            assert not scheduler.preempted[tier] or sequence is scheduler.preempted[tier][0]
            enter(sequence, plan)

        scheduler.ranks.preempt = watched
        scheduler.admission._enter = watched_entry

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
        )

    def play(self, max_steps=4000):
        step = due = number = 0
        while number < len(self.arrivals) or not self.drive.idle:
            while number < len(self.arrivals) and due + self.arrivals[number]["after"] <= step:
                due += self.arrivals[number]["after"]
                self._arrive(step, number)
                number += 1
            self._gateway(step)
            self.drive.step()
            step += 1
            assert step < max_steps, "livelock"
        return self.drive

    def _arrive(self, step, number):
        arrival = self.arrivals[number]
        if self.lost and arrival["link"] == 2:
            return
        self.drive.send(self.request(number, arrival), link=arrival["link"])
        if arrival["cancel_after"] is not None:
            self.cancels.setdefault(step + arrival["cancel_after"], []).append(
                (arrival["link"], number)
            )

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


@given(
    shapes, st.lists(arrivals, min_size=1, max_size=12), st.one_of(st.none(), st.integers(0, 40))
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_trace_ends_with_the_right_tokens_and_balanced_books(shape, arrivals, lose_link_at):
    trace = Trace(shape, arrivals, lose_link_at)
    drive = trace.play().check_idle()
    for (link, request_id), request in drive.requests.items():
        ending = drive.endings.get((link, request_id))
        if ending is None:
            assert link == 2 and trace.lost
            continue
        if getattr(ending, "code", None) == "too_long":
            continue
        cancelled = arrivals[int(request_id[1:])]["cancel_after"] is not None
        for index in range(request.num_choices):
            drive.check_alone(request, link=link, index=index, exactly=not cancelled)
            assert (link, request_id, index) in drive.finishes


@given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 40), st.booleans(), st.booleans()), max_size=12
    ),
    st.booleans(),
    st.sampled_from([0, 1]),
)
@example(3, 12, [(0, 0, False, True), (1, 16, True, False)], True, 0).via(
    "the last lease ran out while a preempted sibling was in prefill again"
)
@settings(max_examples=60, deadline=None)
def test_no_order_of_extensions_buys_a_token_above_the_highest_newer_bound(
    num_choices, first, extensions, preempt, lag
):
    """Against a model of the rule: newest lease_seq wins, bounds never fall."""
    drive = Driver(ScriptedRunner(num_blocks=64, block_size=4), lag=lag)
    drive.send(
        generate_request(
            "r", TEXT[:13], 30, num_choices=num_choices, lease_bound=first, temperature=1.0
        )
    )
    seq, bound, last = 0, first, False
    for number, bid, is_last, pause in extensions:
        if not (last and drive.engine.attempts.get((LINK, "r")) is None):
            drive.send(ExtendLease("r", number, bid, last=is_last))
        if number > seq:
            seq, bound, last = number, max(bound, bid), is_last
        for _ in range(4 if pause else 1):
            drive.step()
            if preempt and drive.scheduler.running["interactive"]:
                drive.scheduler.ranks.preempt(drive.scheduler.running["interactive"][-1], drive.now)
            spent = sum(len(tokens) for tokens in drive.tokens.values())
            assert spent <= bound
    for _ in range(100):
        drive.step()
    spent = sum(len(tokens) for tokens in drive.tokens.values())
    total = 30 * num_choices
    if last or drive.endings:
        assert spent <= bound
    elif bound >= num_choices:
        assert spent == min(bound, total), "a lease was left unspent"
    else:
        assert spent == 0
    drive.send(Cancel("r"))
    drive.run().check_idle()


@given(shapes, st.lists(arrivals, min_size=1, max_size=10))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_trace_is_heard_the_same_with_lag_and_without(shape, arrivals):
    """Tokens, endings, billed counts. How much was cached or computed again is a matter of time where prompts overlap;
    so is which of several choices ended last and gave the attempt its reason."""
    heard = []
    for lag in (0, 1):
        calm = [arrival | {"cancel_after": None} for arrival in arrivals]
        drive = Trace(shape | {"lag": lag}, calm, None).play().check_idle()
        endings = {
            key: (
                drive.requests[key].num_choices > 1 or getattr(e, "reason", None) or e.code,
                e.usage.prompt,
                e.usage.output,
            )
            for key, e in drive.endings.items()
        }
        heard.append(({k: v for k, v in drive.tokens.items() if v}, drive.finishes, endings))
    assert heard[0] == heard[1]
