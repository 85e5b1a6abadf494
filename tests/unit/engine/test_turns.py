"""More streams than a step has time for: they take turns, tenant by tenant."""

from __future__ import annotations

from collections import Counter

import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, generate_request
from simulation import PacedRunner, paced_driver

from workers.engine.queueing.forecast import Forecast, Load, Queued
from workers.engine.queueing.pace import LEAST_ROWS, MIN_STEPS, SHORT_COSTS, TokenBudget
from workers.engine.sequences.sequence import Status
from workers.protocol.messages import BeamParams

FIXED_S, TOKEN_S, TARGET_S = 0.005, 0.001, 0.05
NUM_ROWS = int((TARGET_S - FIXED_S) / TOKEN_S)


def learned(fixed_s: float, token_s: float, kv_s: float = 0.0, target_s: float = TARGET_S):
    budget = TokenBudget(512, target_s)
    for size in (1, 8, 64, 200):
        for kv in (0, 5000):
            for _ in range(MIN_STEPS):
                budget.step_ran(size, kv, fixed_s + token_s * size + kv_s * kv)
    return budget


def test_a_step_has_as_many_rows_as_its_target_has_time_for():
    assert learned(FIXED_S, TOKEN_S).num_rows(0) == pytest.approx(NUM_ROWS, rel=0.03)
    assert learned(FIXED_S, TOKEN_S, 1e-6).num_rows(250) == pytest.approx(NUM_ROWS / 1.25, rel=0.03)


def test_a_fast_device_computes_all_rows_at_once():
    assert learned(0.008, 30e-6).num_rows(1000) == 512


def test_rows_are_not_so_few_that_fixed_costs_are_most_of_what_is_paid():
    budget = learned(0.04, 0.001)
    assert budget.num_rows(0) == pytest.approx((SHORT_COSTS - 1) * 40, rel=0.03)
    assert learned(0.0, 0.1).num_rows(0) == LEAST_ROWS


def test_before_steps_were_seen_nobody_waits_for_a_turn():
    assert TokenBudget(512, TARGET_S).num_rows(1000) == 512


def crowd(num_streams: dict[str, int], num_output: int = 30, **fields) -> Driver:
    """Streams that all run, on a device that knows its pace."""
    runner = PacedRunner((FIXED_S, TOKEN_S, 0.0), num_blocks=4000, block_size=4)
    drive = paced_driver(runner, max_batch_tokens=256, max_running=200)
    drive.send(*(generate_request(f"before{i}", [i, 98, 97], 12) for i in range(40)))
    drive.run()
    for tenant, number in num_streams.items():
        for i in range(number):
            drive.send(generate_request(f"{tenant}{i}", [i, 98, 99], num_output, tenant=tenant, **fields))
    while drive.inbox or not all(s.output for s in drive.scheduler.all_running):
        drive.step(0.0)
    return drive


def rows(output) -> Counter[str]:
    """Tokens that a step brought about, by request."""
    return Counter(
        delta.request_id for _, message in output.messages for delta in getattr(message, "deltas", ()) if delta.tokens
    )


def test_a_step_of_many_streams_stays_within_the_target():
    drive = crowd({"a": 150})
    steps = [drive.step(0.0) for _ in range(30)]
    times = [record.execute_s for output in steps for record in output.steps]
    assert len(times) >= 29
    assert max(times) <= 1.1 * TARGET_S
    drive.run().check_idle()
    assert all(e.reason == "length" for e in drive.endings.values())


def test_everybodys_turn_comes():
    drive = crowd({"a": 150})
    num_turns = -(-150 // (NUM_ROWS - 2))
    seen = Counter()
    for _ in range(3 * num_turns):
        seen += rows(drive.step(0.0))
    assert {f"a{i}" for i in range(150)} == set(seen)
    assert max(seen.values()) - min(seen.values()) <= 1
    assert min(seen.values()) >= 2


def test_streams_of_one_tenant_do_not_put_off_anothers():
    drive = crowd({"many": 150, "few": 2})
    for _ in range(10):
        told = rows(drive.step(0.0))
        assert {"few0", "few1"} <= set(told)
        assert sum(told.values()) >= NUM_ROWS - 4


def test_more_tenants_than_rows_take_turns_too():
    drive = crowd({f"t{i}-": 1 for i in range(100)})
    seen = Counter()
    for _ in range(6):
        seen += rows(drive.step(0.0))
    assert len(seen) == 100
    assert max(seen.values()) - min(seen.values()) <= 1


def test_streams_that_wait_for_a_lease_keep_nobody_from_a_turn():
    drive = crowd({"a": 60})
    parked = [f"b{i}" for i in range(60)]
    drive.send(*(generate_request(n, [5, 98, 97], 30, lease_bound=2) for n in parked))
    for _ in range(20):
        drive.step(0.0)
    for _ in range(4):
        told = rows(drive.step(0.0))
        assert sum(told[f"a{i}"] for i in range(60)) >= NUM_ROWS - 4
    assert all((LINK, name) in drive.engine.attempts for name in parked)


def test_batch_gets_some_rows_beside_more_streams_than_a_step_has_time_for():
    drive = crowd({"a": 100}, 60)
    drive.send(*(generate_request(f"job{i}", [i, 97], 4, tier="batch") for i in range(20)))
    num_steps = 0
    while not any(key[1].startswith("job") for key in drive.endings):
        drive.step(0.0)
        num_steps += 1
        assert num_steps < 60
    drive.run().check_idle()


@pytest.mark.parametrize("has_chat", [True, False])
def test_batch_streams_take_turns_where_the_budget_has_fewer_tokens(has_chat):
    """Beside a chat they get a quarter of the step. Without one, the device's memory takes only 16 tokens."""
    drive = Driver(ScriptedRunner(num_blocks=4000, block_size=4), max_batch_tokens=64, max_running=64)
    drive.send(*(generate_request(f"job{i}", [i, 97], 100, tier="batch") for i in range(40)))
    for _ in range(10):
        drive.step()
    if has_chat:
        drive.send(generate_request("chat", [5, 98, 97], 50))
        drive.step()
    seen = Counter()
    for _ in range(2 * 40 // 16 + 1):
        if not has_chat:
            drive.scheduler.budget.cut(32)
        seen += rows(drive.step())
    assert {f"job{i}" for i in range(40)} <= set(seen)
    assert ("chat" in seen) is has_chat


def test_batch_below_its_floor_gets_a_row_where_streams_could_take_the_whole_budget():
    """The device's memory takes 16 tokens, for which 30 streams take turns."""
    drive = Driver(ScriptedRunner(num_blocks=4000, block_size=4), max_batch_tokens=64, max_running=64)
    drive.send(*(generate_request(f"chat{i}", [i, 98, 97], 150) for i in range(30)))
    for _ in range(10):
        drive.step()
    drive.send(generate_request("job", [5, 97], 4, tier="batch"))
    num_steps = 0
    while (LINK, "job") not in drive.endings:
        drive.scheduler.budget.cut(32)
        assert sum(rows(drive.step()).values()) <= 16
        num_steps += 1
        assert num_steps < 60, "batch was kept out"


CROWDS = {
    "one tenant": ("fair", [{}] * 60),
    "six tenants": ("fair", [{"tenant": f"t{i % 6}"} for i in range(60)]),
    "first come": ("fcfs", [{"tenant": f"t{i % 6}"} for i in range(60)]),
    "choices": ("fair", [{"tenant": f"t{i % 2}", "num_choices": 3} for i in range(20)]),
    "beams": ("fair", [{"num_choices": 2, "beams": BeamParams()} if i % 5 == 0 else {} for i in range(60)]),
}


def watch_plans(drive: Driver) -> Counter[str]:
    """Counts from here on the plans that have no row for some stream, and the rows without all their blocks."""
    scheduler, found = drive.scheduler, Counter()
    plan_step = scheduler.plan

    def plan(*args, **options):
        plan = plan_step(*args, **options)
        found["turns"] += any(s.decoding and not plan.has_row(s) for s in scheduler.all_running)
        for sequence, num_tokens, _ in plan.work:
            end = scheduler.layout.place(sequence) + num_tokens
            has_blocks = len(sequence.block_ids) * drive.cache.block_size >= end
            found["rows without blocks"] += sequence.status is not Status.RUNNING or not has_blocks
        return plan

    scheduler.plan = plan
    return found


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize(("policy", "streams"), CROWDS.values(), ids=CROWDS)
def test_a_stream_with_a_row_in_a_plan_keeps_its_blocks_whoever_lacks_some(policy, streams, lag):
    """The pool has 130 blocks, the streams want 540, and a step has 32 rows."""
    runner = PacedRunner((FIXED_S, 2 * TOKEN_S, 0.0), num_blocks=130, block_size=4)
    drive = paced_driver(runner, max_batch_tokens=256, max_running=200, lag=lag, policy=policy)
    drive.send(*(generate_request(f"before{i}", [i, 98, 97], 12) for i in range(40)))
    drive.run()
    found, num_preempted = watch_plans(drive), drive.engine.totals.num_preempted
    drive.send(*(generate_request(f"r{i}", [i, 98, 99], 30, **fields) for i, fields in enumerate(streams)))
    for _ in range(4):
        drive.step(0.0)
    drive.send(*(generate_request(f"late{i}", [i, 97, 97], 40, tenant="late") for i in range(4)))
    drive.run().check_idle()
    assert found["rows without blocks"] == 0
    assert found["turns"] >= 10
    assert drive.engine.totals.num_preempted >= num_preempted + 10
    for key, request in drive.requests.items():
        assert drive.endings[key].reason == "length"
        for index in range(request.num_choices if request.beams is None else 0):
            drive.check_alone(request, index=index)


def test_a_forecast_counts_the_fixed_costs_of_each_turn():
    """128 places, and steps of 32 rows: a token of each costs four steps."""
    fixed_s, token_s = 0.1, 0.02
    found = Forecast(learned(fixed_s, token_s))
    found.answered(100)
    wait_s = found.wait_s(Queued(31, 31), Load(num_running=128, num_places=128))
    num_rounds = 32 * 100 / 128
    assert wait_s == pytest.approx(num_rounds * (4 * fixed_s + 128 * token_s), rel=0.05)
