"""Random traces through the real scheduler, cache and engine with a scripted model: nothing deadlocks, nothing leaks,
every token is the one the request would have got alone, and the books agree with the steps."""

from __future__ import annotations

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, generate_request
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from simulation import TEXT, Trace

from workers.protocol.messages import Cancel, ExtendLease

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
            {"max_step_tokens": st.sampled_from([None, None, None, 1, 2, 3, 7]), "late": st.booleans()}
        ),
    }
)


SHAPE = {
    "num_blocks": 20,
    "max_batch_tokens": 4,
    "max_running": 3,
    "eos_every": 0,
    "lag": 0,
    "device": {"max_step_tokens": None, "late": False},
}
LONG = {
    "after": 0,
    "tenant": "A",
    "tier": "interactive",
    "length": 36,
    "variant": 0,
    "max_tokens": 24,
    "num_choices": 1,
    "cache_write": False,
    "link": 1,
    "first_lease": 1,
    "cancel_after": None,
}


@given(shapes, st.lists(arrivals, min_size=1, max_size=12), st.one_of(st.none(), st.integers(0, 40)))
@example(SHAPE, [LONG], None).via("prompt and output together are one token more than the pool holds")
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_trace_ends_with_the_right_tokens_and_balanced_books(shape, arrivals, lose_link_at):
    trace = Trace(shape, arrivals, lose_link_at)
    trace.play()
    trace.check()


@given(
    st.integers(1, 3),
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40), st.booleans(), st.booleans()), max_size=12),
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
    drive.send(generate_request("r", TEXT[:13], 30, num_choices=num_choices, lease_bound=first, temperature=1.0))
    seq, bound, last = 0, first, False
    for number, bid, is_last, pause in extensions:
        if not (last and drive.engine.attempts.get((LINK, "r")) is None):
            drive.send(ExtendLease("r", number, bid, last=is_last))
        if number > seq:
            seq, bound, last = number, max(bound, bid), is_last
        for _ in range(4 if pause else 1):
            drive.step()
            if preempt and drive.scheduler.running["interactive"]:
                drive.scheduler.ranks.preempt(drive.scheduler.running["interactive"][-1], drive.now, "blocks")
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


@pytest.mark.rest
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
