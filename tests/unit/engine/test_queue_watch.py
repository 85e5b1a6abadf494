"""Figures of the queues: who waits, for how long, and how far tenants are apart."""

from engine_driver import Driver
from fakes import ScriptedRunner, generate_request

from workers.engine.metrics import Metrics
from workers.engine.scheduling.queue_watch import queue_figures


def driver(**options):
    return Driver(ScriptedRunner(num_blocks=64, block_size=4), **options)


def look(drive):
    return queue_figures(drive.engine.attempts.values(), drive.scheduler, drive.now)


def test_who_runs_and_who_waits_is_told_by_tier():
    drive = driver(max_running=1)
    drive.send(generate_request("a", (97,) * 8, 20, tenant="one"))
    drive.step()
    drive.send(generate_request("b", (98,) * 8, 20, tenant="two"), generate_request("c", (99,) * 8, 20, tenant="two"))
    drive.send(generate_request("d", (100,) * 8, 20, tenant="three", tier="batch"))
    drive.step()
    drive.step(after_s=3.0)
    found = look(drive)
    interactive, batch = found.tiers["interactive"], found.tiers["batch"]
    assert (interactive.num_running, interactive.num_waiting, interactive.num_tenants_waiting) == (1, 2, 1)
    assert (batch.num_running, batch.num_waiting, batch.num_tenants_waiting) == (0, 1, 1)
    assert found.tenants.keys() == {"one", "two", "three"}
    assert interactive.oldest_wait_s == batch.oldest_wait_s == 3.0
    drive.run()
    assert look(drive).tiers["interactive"].oldest_wait_s == 0.0
    assert look(drive).tenants == {}


def test_the_spread_is_that_of_tenants_that_wait():
    drive = driver(max_running=1)
    drive.send(generate_request("a", (97,) * 40, 20, tenant="much"), generate_request("b", (97,) * 8, 4, tenant="much"))
    drive.step()
    assert look(drive).counter_spread == 0.0, "one tenant cannot be ahead of itself"
    drive.send(generate_request("c", (98,) * 8, 20, tenant="little"))
    drive.step()
    counters = drive.scheduler.counters
    assert look(drive).counter_spread == counters["much"] - counters["little"] > 0


def test_a_scrape_shows_them_and_the_tokens_of_each_tier():
    drive, metrics = driver(), Metrics("m", 0, 4, 64)
    drive.send(generate_request("a", (97,) * 8, 4), generate_request("b", (98,) * 6, 4, tier="batch"))
    for _ in range(20):
        metrics.observe(drive.step(after_s=1.1))
    value = metrics.registry.get_sample_value
    computed = {
        (phase, tier): value("headgate_step_tokens_total", {"phase": phase, "tier": tier})
        for phase in ("prefill", "decode")
        for tier in ("interactive", "batch")
    }
    assert (computed["prefill", "interactive"], computed["prefill", "batch"]) == (8, 6)
    assert computed["decode", "interactive"] == computed["decode", "batch"] == 3
    assert value("headgate_active_tenants") == 0
    assert value("headgate_preemptions_total", {"cause": "blocks", "tier": "batch"}) == 0
    for tier in ("interactive", "batch"):
        assert value("headgate_oldest_wait_seconds", {"model_name": "m", "engine": "0", "tier": tier}) == 0
    assert value("headgate_cache_match_seconds_count") == 2
    assert value("headgate_cache_nodes") >= 1
