"""KV budgets under any trace: no block that was computed without full sight ever reaches the tree, nothing leaks."""

from __future__ import annotations

from engine_driver import LINK, Driver
from fakes import generate_request
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from thinned_runner import ThinnedRunner, check_tree

from workers.engine.sparsity.budget import Sparsity
from workers.protocol.messages import Cancel, SamplingParams

SIZE = 4
TEXT = tuple(b"a line! that all begin with, and then each goes on in its own way")

asks = st.fixed_dictionaries(
    {
        "length": st.integers(1, 60),
        "own": st.integers(0, 3),
        "max_tokens": st.integers(0, 50),
        "num_choices": st.integers(1, 3),
        "tenant": st.sampled_from(["a", "b"]),
        "tier": st.sampled_from(["interactive", "batch"]),
        "cache_write": st.booleans(),
        "cache_read": st.booleans(),
        "at": st.integers(0, 30),
        "cancel_after": st.none() | st.integers(0, 30),
    }
)


def request_of(number, ask):
    prompt = (*TEXT[: ask["length"]], 65 + ask["own"])
    told = {k: ask[k] for k in ("num_choices", "tenant", "tier", "cache_write", "cache_read")}
    sampling = SamplingParams(seed=number, temperature=1.0)
    return generate_request(f"r{number}", prompt, ask["max_tokens"], sampling=sampling, **told)


@given(
    st.lists(asks, min_size=1, max_size=8),
    st.integers(4, 8),
    st.integers(40, 80),
    st.sampled_from(["heavy", "recent"]),
    st.sets(st.integers(0, 80), max_size=8),
    st.sets(st.integers(0, 80), max_size=2),
    st.booleans(),
)
@example(
    [
        dict.fromkeys(("own", "at"), 0)
        | {
            "length": 60,
            "max_tokens": 50,
            "num_choices": 3,
            "tenant": "a",
            "tier": "interactive",
            "cache_write": True,
            "cache_read": True,
            "cancel_after": None,
        }
    ]
    * 4,
    8,
    40,
    "heavy",
    {20, 30, 40},
    {25},
    True,
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_sparse_block_reaches_the_tree(arrivals, budget, num_blocks, policy, preempt_at, fail_at, host):
    drive = Driver(
        ThinnedRunner(num_blocks=num_blocks, block_size=SIZE),
        sparsity=Sparsity(policy, budget, SIZE),
        host={"num_slots": 64} if host else None,
        max_batch_tokens=24,
        max_running=24,
    )
    todo = sorted(enumerate(arrivals), key=lambda pair: pair[1]["at"])
    for number in range(3000):
        while todo and todo[0][1]["at"] <= number:
            drive.send(request_of(*todo.pop(0)))
        for index, ask in enumerate(arrivals):
            sent = (LINK, f"r{index}") in drive.requests
            if sent and ask["cancel_after"] is not None and number == ask["at"] + ask["cancel_after"]:
                drive.send(Cancel(f"r{index}"))
        if number in fail_at:
            drive.runner.fail_next = RuntimeError("a bad step")
        drive.step()
        drive.runner.fail_next = None
        check_tree(drive)
        for sequence in drive.scheduler.all_running:
            assert not drive.scheduler.layout.num_dropped(sequence) or len(sequence.block_ids) <= budget
        if number in preempt_at and drive.scheduler.all_running:
            drive.scheduler.ranks.preempt(drive.scheduler.all_running[-1], drive.now, "blocks")
        if drive.idle and not todo:
            break
    drive.check_idle()
