"""Figures of the cache each second, its laws in idle minutes; and what one request held."""

from __future__ import annotations

import logging

from engine_driver import LINK, Driver
from fakes import ScriptedRunner, generate_request

from cache import invariants
from cache.prefix_cache import PrefixCache
from workers.engine.metrics import Metrics
from workers.engine.reports.cache_watch import LAWS_EVERY_S, CacheWatch
from workers.protocol.messages import CacheCommand, CacheRange

IDLE_ROUNDS = len(invariants.LAWS)


def test_an_idle_minute_checks_every_law_once_and_a_broken_one_is_an_error_not_a_crash(caplog):
    cache = PrefixCache(16, 2)
    watch = CacheWatch(cache)
    watch.look(0.0, busy=False)
    for n in range(IDLE_ROUNDS):
        watch.look(LAWS_EVERY_S + n / 10, busy=False)
    assert watch.num_broken_laws == 0
    cache.owners.usage.num_evictable += 1
    with caplog.at_level(logging.ERROR):
        for n in range(IDLE_ROUNDS):
            watch.look(LAWS_EVERY_S * 2 + 1 + n / 10, busy=False)
    assert watch.num_broken_laws == 2
    assert "0 blocks are evictable, the count says 1" in caplog.text


def test_a_check_that_stumbles_is_counted_too(caplog):
    cache = PrefixCache(16, 2)
    cache.owners.usage = None
    watch = CacheWatch(cache)
    watch._figures_due = 1e9
    watch.look(0.0, busy=False)
    for n in range(IDLE_ROUNDS):
        watch.look(LAWS_EVERY_S + n / 10, busy=False)
    assert watch.num_broken_laws > 0


def test_a_busy_engine_is_not_stopped_for_laws():
    cache = PrefixCache(16, 2)
    cache.owners.usage.num_evictable += 1
    watch = CacheWatch(cache)
    for now in range(300):
        watch.look(float(now), busy=True)
    assert watch.num_broken_laws == 0


def test_figures_reach_the_metrics_by_reason_and_by_tenant():
    runner = ScriptedRunner(num_blocks=24, block_size=4)
    drive = Driver(runner, max_batch_tokens=64, max_running=4)
    metrics = Metrics("m", 0, 4, 24, by_tenant=True)
    now = 0.0
    drive.engine._watch._figures_due = 0.0
    for number in range(6):
        prompt = [number] * 30
        drive.send(generate_request(f"r{number}", prompt, 2, tenant=f"t{number % 2}"))
        drive.run()
        drive.engine._watch._figures_due = now
        metrics.observe(drive.step())
    value = metrics.registry.get_sample_value
    lost = value("headgate_cache_evicted_blocks_total", {"reason": "capacity"})
    assert lost is not None
    assert lost > 0
    by_tenant = [
        value("headgate_cache_tenant_evicted_blocks_total", {"tenant": t, "side": "suffered"}) for t in ("t0", "t1")
    ]
    assert sum(by_tenant) == lost
    assert value("headgate_cache_broken_laws_total", {}) == 0


def test_a_look_and_what_is_remembered_go_by_the_tenants_that_have_blocks():
    drive = Driver(ScriptedRunner(num_blocks=24, block_size=4), max_batch_tokens=64, max_running=4)
    metrics, looked = Metrics("m", 0, 4, 24, by_tenant=True), []
    for number in range(200):
        drive.send(generate_request(f"r{number}", [number % 250] * 30, 2, tenant=f"t{number}"))
        drive.run()
        drive.engine._watch._figures_due = 0.0
        metrics.observe(out := drive.step())
        looked.append(len(out.cache.tenants))
    assert max(looked) < 10
    assert len(drive.cache.tenants()) < 10
    value = metrics.registry.get_sample_value
    lost = [
        value("headgate_cache_tenant_evicted_blocks_total", {"tenant": tenant, "side": "suffered"})
        for tenant in ("_other", *(f"t{number}" for number in range(100)))
    ]
    assert sum(lost) == value("headgate_cache_evicted_blocks_total", {"reason": "capacity"})
    kept = value("headgate_cache_tenant_blocks", {"tenant": "_other", "state": "retained"})
    assert kept == sum(drive.cache.usage(tenant).num_retained for tenant in drive.cache.tenants())


def test_a_request_is_told_how_much_of_its_prompt_was_pinned_and_a_purge_takes_it():
    runner = ScriptedRunner(num_blocks=200, block_size=4)
    drive = Driver(runner)
    cache = drive.engine.cache
    drive.send(generate_request("r", [7] * 60, 2, tenant="anna", retention=(CacheRange(ttl_s=60),)))
    drive.run()
    assert drive.endings[LINK, "r"].cache.num_pinned_blocks == cache.retention.tenant_limit
    drive.send(CacheCommand("drop", tenant="anna"))
    drive.step()
    assert (cache.usage("anna").num_blocks, cache.num_pinned) == (0, 0)
