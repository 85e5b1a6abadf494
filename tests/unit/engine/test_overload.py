from collections import Counter

import pytest
from engine_driver import LINK, Driver
from fakes import generate_request
from simulation import PacedRunner, paced_driver

from workers.engine.queueing.fairness import VirtualCounters
from workers.engine.queueing.forecast import Queued
from workers.engine.queueing.overload import EARLY_S, GRACE_S, JITTER, LONGEST_S, SHORT, Arrival, Overload
from workers.protocol.messages import Failed

RATE = 1000.0


def refuse(door: Overload, arrival: Arrival, queued: dict[str, int], now=0.0) -> float:
    """`queued`: tokens by tenant, of prompts of a hundred each."""
    waiting = {tenant: Queued(tokens, tokens / 100) for tenant, tokens in queued.items()}
    return door.refuse(arrival, waiting, now, lambda ahead: ahead.num_tokens / RATE)


def arrival(tenant="a", prompt=1, limit_s=2.0, num_tokens=100):
    return Arrival(tenant, 1.0, num_tokens, prompt, limit_s)


def overload(*tenants):
    counters = VirtualCounters()
    for tenant in tenants:
        counters.enter(tenant, 1.0)
    return Overload(counters), counters


def test_who_waits_less_than_the_target_is_welcome():
    door, _ = overload("a")
    assert refuse(door, arrival(), {"a": 1900}, 0.0) == 0


def test_who_would_wait_longer_is_told_when_it_will_be_short_enough():
    door, _ = overload("a")
    told = refuse(door, arrival(), {"a": 5000}, 0.0)
    assert 4 * (1 - JITTER) <= told <= 4 * (1 + JITTER)


def test_those_refused_later_are_told_a_later_time():
    door, _ = overload("a")
    told = [refuse(door, arrival(prompt=i), {"a": 3000}, 0.0) for i in range(50)]
    assert sum(told[40:]) / 10 > sum(told[:10]) / 10 + 2


def test_who_comes_when_he_was_told_is_let_in_before_newcomers():
    door, _ = overload("a")
    told = refuse(door, arrival(prompt=1), {"a": 3000}, 0.0)
    for i in range(2, 40):
        refuse(door, arrival(prompt=i), {"a": 3000}, 0.0)
    assert refuse(door, arrival(prompt=99), {"a": 1500}, told) > 0
    assert refuse(door, arrival(prompt=1), {"a": 1500}, told) == 0


def test_places_of_those_who_never_come_lapse_and_do_not_keep_the_device_idle():
    door, _ = overload("a")
    for i in range(40):
        refuse(door, arrival(prompt=i), {"a": 3000}, 0.0)
    assert door.kept == Queued(4000, 40)
    assert refuse(door, arrival(prompt=99), {"a": int(SHORT * 2 * RATE)}, 0.1) == 0
    refuse(door, arrival(prompt=99), {}, LONGEST_S + GRACE_S)
    assert door.kept == Queued(0, 0)


def test_a_flood_of_another_tenant_does_not_refuse_somebody_with_a_small_counter():
    door, counters = overload("flood", "calm")
    counters.charge("flood", computed=50_000)
    queued = {"flood": 100_000}
    assert refuse(door, arrival("calm"), queued, 0.0) == 0
    assert refuse(door, arrival("flood"), queued, 0.0) > 0


def test_with_a_long_target_nobody_is_sent_away_for_half_of_it():
    door, _ = overload("a")
    told = refuse(door, arrival(limit_s=60.0), {"a": 61_000}, 0.0)
    assert (1 + EARLY_S) * (1 - JITTER) <= told <= (1 + EARLY_S) * (1 + JITTER)


def test_of_a_tenant_that_is_ahead_nothing_stands_before_somebody_who_is_not():
    door, counters = overload("ahead", "behind")
    counters.charge("ahead", computed=1000)
    waits = []
    door.refuse(arrival("behind"), {"ahead": Queued(5000, 50)}, 0.0, lambda a: waits.append(a) or 0)
    counters.charge("behind", computed=1200)
    door.refuse(arrival("behind"), {"ahead": Queued(5000, 50)}, 0.0, lambda a: waits.append(a) or 0)
    assert waits == [Queued(0, 0), Queued(300, 3)]


def slow_driver(**options) -> Driver:
    """Some 450 prompt tokens a second."""
    runner = PacedRunner((0.01, 0.002, 0.0), num_blocks=2000, block_size=4)
    return paced_driver(runner, max_batch_tokens=64, max_running=8, **options)


def test_a_worker_refuses_with_a_time_and_takes_the_request_then():
    drive = slow_driver(ttft_s=1.0)
    prompts = [[i, *[98] * 60] for i in range(40)]
    drive.send(generate_request("warm", prompts[0], 12))
    drive.run()
    for i in range(1, 30):
        drive.send(generate_request(f"r{i}", prompts[i], 4))
    drive.step()
    refused = [e for e in drive.endings.values() if isinstance(e, Failed)]
    assert refused
    assert all(e.code == "overloaded" for e in refused)
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


def test_batch_has_time_and_is_not_refused():
    drive = slow_driver(ttft_s=0.5)
    drive.send(generate_request("warm", [1, *[98] * 60], 12))
    drive.run()
    drive.send(*[generate_request(f"r{i}", [i, *[98] * 60], 4) for i in range(2, 12)])
    drive.send(generate_request("hurry", [50, *[98] * 60], 4))
    drive.send(generate_request("job", [52, *[98] * 60], 4, tier="batch"))
    drive.run().check_idle()
    assert drive.endings[LINK, "hurry"].code == "overloaded"
    assert drive.endings[LINK, "job"].reason == "length"


# --- B1: small bursts on a worker that was idle, or had done only tiny steps ---

QUICK = (0.004, 0.0002, 0.0)
"""Of a small model on two cores."""


def burst(drive: Driver, num_requests: int, num_tokens: int) -> list[object]:
    """What became of so many prompts that came at once."""
    names = [f"burst{i}" for i in range(num_requests)]
    drive.send(*(generate_request(n, [i, *[98] * (num_tokens - 1)], 8) for i, n in enumerate(names)))
    drive.run()
    return [drive.endings[LINK, name] for name in names]


def one_after_another(drive: Driver, num_requests: int, num_tokens: int, pause_s: float) -> None:
    for i in range(num_requests):
        drive.send(generate_request(f"small{i}", [i, *[97] * (num_tokens - 1)], 4))
        drive.step(pause_s)
        drive.run()


class BusyRunner(PacedRunner):
    """On a machine that others use too: one step in five takes thirty times as long, the first ones among them."""

    num_ran = 0

    def execute(self, rows):
        if self.num_ran % 5 == 0:
            self.elapse(30 * self.pace[0])
        self.num_ran += 1
        return super().execute(rows)


@pytest.mark.parametrize(
    ("runner", "num_before", "size_before", "num_requests", "num_tokens"),
    [
        (PacedRunner, 45, 1, 8, 400),
        (PacedRunner, 40, 12, 8, 1500),
        (BusyRunner, 45, 1, 8, 400),
        (BusyRunner, 40, 12, 8, 1500),
        (BusyRunner, 20, 1, 24, 12),
    ],
)
def test_b1_a_burst_after_small_requests_is_served_where_it_fits_the_target(
    runner, num_before, size_before, num_requests, num_tokens
):
    """With a target of ten seconds, so that the prediction is looked at, not the default."""
    device = runner(QUICK, num_blocks=1000, block_size=16)
    drive = paced_driver(device, max_batch_tokens=512, ttft_s=10.0)
    one_after_another(drive, num_before, size_before, pause_s=0.7)
    endings = burst(drive, num_requests, num_tokens)
    assert [e.reason for e in endings if not isinstance(e, Failed)] == ["length"] * num_requests


def test_b1_no_tenant_fills_the_worker_so_that_others_are_kept_out(monkeypatch):
    monkeypatch.setattr("workers.engine.step.request_validator.MAX_PRESENT", 12)
    drive = slow_driver()
    for tenant in "abc":
        drive.send(*(generate_request(f"{tenant}{i}", [i, 98], 4, tenant=tenant) for i in range(20)))
    drive.step()
    present = Counter(attempt.message.tenant for attempt in drive.engine.attempts.values())
    assert present == {"a": 6, "b": 3, "c": 2}, "one has half at most, the next half of the rest"
    refused = [e for e in drive.endings.values() if isinstance(e, Failed)]
    assert {e.code for e in refused} == {"overloaded"}
    drive.run().check_idle()
    drive.send(*(generate_request(f"b{i}", [i, 98], 4, tenant="b") for i in range(20, 26)))
    drive.step()
    assert len(drive.engine.attempts) == 6
    drive.run().check_idle()


# --- what was learned under load, and an idle worker ---


class DearDraws(PacedRunner):
    """A small model with a large vocabulary on two cores: a prompt's token takes 0.2 ms, one that is drawn 4 ms. When
    hundreds of streams run at once, steps take more than a second."""

    draw_s = 0.004

    def execute(self, rows):
        self.elapse(self.draw_s * sum(len(row.draws) for row in rows))
        return super().execute(rows)


def after_a_flood(**options) -> Driver:
    """Hundreds of streams ran at once, and the last of them ended."""
    drive = paced_driver(
        DearDraws(QUICK, num_blocks=6000, block_size=16), max_batch_tokens=512, max_running=256, **options
    )
    drive.send(*(generate_request(f"flood{i}", [i, *[96] * 7], 40) for i in range(256)))
    return drive.run()


def pause(drive: Driver, seconds: float) -> None:
    """An idle engine wakes up from time to time."""
    until = drive.now + seconds
    while drive.now < until:
        drive.step(0.5)


def test_an_idle_worker_refuses_nobody_for_what_steps_took_under_load():
    drive = after_a_flood()
    pause(drive, 3.0)
    endings = burst(drive, 200, 250)
    assert Counter(type(ending).__name__ for ending in endings) == {"Finished": 200}


def test_eight_steps_after_a_rest_a_wait_is_forecast_from_these():
    """Whoever comes into the midst of a burst is told what holds now, not what held under load."""
    drive = after_a_flood()
    pause(drive, 3.0)
    drive.send(*(generate_request(f"burst{i}", [i, *[98] * 249], 1) for i in range(100)))
    for _ in range(10):
        drive.step(0.0)
    began, foretold = drive.now, drive.scheduler.wait_s()
    drive.send(generate_request("late", [101, *[98] * 249], 1))
    drive.run()
    assert drive.endings[LINK, "late"].reason == "length"
    assert (drive.now - began) / 2 < foretold < 2 * (drive.now - began)


def test_a_worker_that_rests_keeps_no_places():
    """It has room for whoever comes, so the times that it told were wrong."""
    drive = after_a_flood(ttft_s=1.0)
    drive.send(*(generate_request(f"r{i}", [i, *[98] * 250], 4) for i in range(120)))
    drive.run()
    told = [e for e in drive.endings.values() if isinstance(e, Failed)]
    assert told
    assert drive.scheduler.overload.kept.num_sequences
    pause(drive, 3.0)
    drive.send(generate_request("next", [251, *[98] * 10], 4))
    drive.step()
    assert drive.scheduler.overload.kept == Queued()
    drive.run()


def test_whoever_comes_to_an_idle_worker_is_let_in_though_the_forecast_says_otherwise(monkeypatch):
    drive = after_a_flood()
    monkeypatch.setattr(drive.scheduler.forecast, "wait_s", lambda ahead, load: 1000.0)
    drive.send(generate_request("one", [1, 98], 4), generate_request("two", [2, 98], 4))
    drive.run()
    assert drive.endings[LINK, "one"].reason == "length"
    assert drive.endings[LINK, "two"].code == "overloaded"
