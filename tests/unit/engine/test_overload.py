import pytest
from engine_driver import LINK, Driver
from fakes import generate_request
from simulation import PacedRunner, paced_driver

from workers.engine.fairness import VirtualCounters
from workers.engine.overload import GRACE_S, JITTER, LONGEST_S, SHORT, Arrival, DrainRate, Overload
from workers.protocol.messages import Failed

RATE = 1000.0


def arrival(tenant="a", prompt=1, limit_s=2.0, num_tokens=100):
    return Arrival(tenant, 1.0, num_tokens, prompt, limit_s)


def overload(*tenants):
    counters = VirtualCounters()
    for tenant in tenants:
        counters.enter(tenant, 1.0)
    return Overload(counters), counters


def test_who_waits_less_than_the_target_is_welcome():
    door, _ = overload("a")
    assert door.refuse(arrival(), {"a": 1900}, 0, 0.0, RATE) == 0


def test_who_would_wait_longer_is_told_when_it_will_be_short_enough():
    door, _ = overload("a")
    told = door.refuse(arrival(), {"a": 5000}, 0, 0.0, RATE)
    assert 4 * (1 - JITTER) <= told <= 4 * (1 + JITTER)


def test_those_refused_later_are_told_a_later_time():
    door, _ = overload("a")
    told = [door.refuse(arrival(prompt=i), {"a": 3000}, 0, 0.0, RATE) for i in range(50)]
    assert sum(told[40:]) / 10 > sum(told[:10]) / 10 + 2


def test_who_comes_when_he_was_told_is_let_in_before_newcomers():
    door, _ = overload("a")
    told = door.refuse(arrival(prompt=1), {"a": 3000}, 0, 0.0, RATE)
    for i in range(2, 40):
        door.refuse(arrival(prompt=i), {"a": 3000}, 0, 0.0, RATE)
    assert door.refuse(arrival(prompt=99), {"a": 1500}, 0, told, RATE) > 0
    assert door.refuse(arrival(prompt=1), {"a": 1500}, 0, told, RATE) == 0


def test_places_of_those_who_never_come_lapse_and_do_not_keep_the_device_idle():
    door, _ = overload("a")
    for i in range(40):
        door.refuse(arrival(prompt=i), {"a": 3000}, 0, 0.0, RATE)
    assert door.num_kept == 4000
    assert door.refuse(arrival(prompt=99), {"a": int(SHORT * 2 * RATE)}, 0, 0.1, RATE) == 0
    door.refuse(arrival(prompt=99), {}, 0, LONGEST_S + GRACE_S, RATE)
    assert door.num_kept == 0


def test_a_flood_of_another_tenant_does_not_refuse_somebody_with_a_small_counter():
    door, counters = overload("flood", "calm")
    counters.charge("flood", computed=50_000)
    queued = {"flood": 100_000}
    assert door.refuse(arrival("calm"), queued, 0, 0.0, RATE) == 0
    assert door.refuse(arrival("flood"), queued, 0, 0.0, RATE) > 0


def test_nothing_is_refused_before_anything_was_measured():
    door, _ = overload("a")
    assert door.refuse(arrival(), {"a": 10**9}, 0, 0.0, 0.0) == 0


def test_the_drain_rate_counts_only_time_in_which_somebody_waits():
    drain = DrainRate()
    for step in range(100):
        drain.observe(step * 0.1, step * 50, backlog=True)
    measured = drain.per_second(500.0)
    assert measured == pytest.approx(500, rel=0.05)
    drain.observe(100.0, 100 * 50, backlog=False)
    assert drain.per_second(500.0) == pytest.approx(measured)


def slow_driver(**options) -> Driver:
    """Some 450 prompt tokens a second."""
    runner = PacedRunner((0.01, 0.002, 0.0), num_blocks=2000, block_size=4)
    return paced_driver(runner, max_batch_tokens=64, max_running=8, **options)


def test_a_worker_refuses_with_a_time_and_takes_the_request_then():
    drive = slow_driver(ttft_s=1.0)
    prompts = [[i, *[98] * 60] for i in range(40)]
    drive.send(generate_request("warm", prompts[0], 4))
    drive.run()
    for i in range(1, 30):
        drive.send(generate_request(f"r{i}", prompts[i], 4))
    drive.step()
    refused = [e for e in drive.endings.values() if isinstance(e, Failed)]
    assert refused
    assert all(e.code == "overloaded" and e.retryable for e in refused)
    last = max(refused, key=lambda e: e.retry_after_ms)
    assert last.retry_after_ms > 500
    until = drive.now + last.retry_after_ms / 1000
    while drive.now < until:
        drive.step()
    again = drive.requests[LINK, last.request_id]
    drive.endings.pop((LINK, last.request_id))
    drive.send(again)
    drive.run()
    assert drive.endings[LINK, last.request_id].reason == "length"


def test_a_deadline_that_the_queue_would_miss_is_refused_at_once():
    drive = slow_driver()
    drive.send(generate_request("warm", [1, *[98] * 60], 4))
    drive.run()
    drive.send(*[generate_request(f"r{i}", [i, *[98] * 60], 4) for i in range(2, 12)])
    drive.step()
    drive.send(
        generate_request("hurry", [50, *[98] * 60], 4, deadline_ms=200),
        generate_request("calm", [51, *[98] * 60], 4),
        generate_request("job", [52, *[98] * 60], 4, tier="batch", deadline_ms=9000),
    )
    drive.step()
    assert drive.endings[LINK, "hurry"].code == "overloaded"
    drive.run().check_idle()
    assert drive.endings[LINK, "calm"].reason == "length"
    assert drive.endings[LINK, "job"].reason == "length"
