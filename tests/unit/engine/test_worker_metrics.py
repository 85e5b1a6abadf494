"""What a worker's page says of attempts, steps and blocks, and what it cannot be made to say."""

from __future__ import annotations

import re

import msgspec
import pytest
from engine_driver import LINK, Driver
from fakes import ScriptedRunner, encode, generate_request
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics

from workers.engine.metrics import Metrics
from workers.engine.scheduling.queue_watch import queue_figures
from workers.engine.values.errors import DeviceOutOfMemory
from workers.engine.values.queue_figures import CAUSES
from workers.process.metrics_text import OPENMETRICS, expose
from workers.protocol.messages import ExtendLease

NUM_HOSTILE = 100_000
"""Values that a client might choose."""
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TEXT = encode("the quick brown fox jumps over the lazy dog")
TIMES = (
    "vllm:time_to_first_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_inference_time_seconds",
)


def driver(num_blocks=64, **options):
    return Driver(ScriptedRunner(num_blocks=num_blocks, block_size=4), **options)


def preempted(drive) -> dict[tuple[str, str], int]:
    """The preemptions by cause and tier that happened."""
    found = queue_figures(drive.engine.attempts.values(), drive.scheduler, drive.now)
    return {(c, tier): n for tier, one in found.tiers.items() for c, n in one.num_preempted.items() if n}


def observed(drive, num_blocks=64) -> Metrics:
    """Metrics that saw everything, with figures of the present state."""
    metrics = Metrics("m", 0, 4, num_blocks)
    drive.step(after_s=1.1)
    for output in drive.outputs:
        metrics.observe(output)
    return metrics


def grown_together() -> Driver:
    """Two sequences that are let in, and then grow until the pool is too small for both."""
    drive = driver(21, max_batch_tokens=200)
    drive.send(*[generate_request(f"r{i}", TEXT[i : i + 20], 40, lease_bound=8) for i in range(2)])
    drive.step()
    drive.send(*[ExtendLease(f"r{i}", 1, 40) for i in range(2)])
    return drive.run()


def test_a_sequence_that_grows_takes_the_blocks_of_a_later_one():
    assert set(preempted(grown_together())) == {("blocks", "interactive")}


def test_a_batch_sequence_gives_its_place_to_a_chat():
    drive = driver(max_running=2)
    drive.send(*[generate_request(f"b{i}", TEXT[i:], 20, tier="batch") for i in range(2)])
    drive.step()
    drive.send(*[generate_request(f"c{i}", TEXT[i + 9 :], 20) for i in range(2)])
    drive.run()
    assert set(preempted(drive)) == {("tier", "batch")}


def test_a_sequence_that_is_parked_for_long_loses_its_blocks():
    drive = driver(lease_wait_s=1.0)
    drive.send(generate_request("r", TEXT, 20, lease_bound=4))
    for _ in range(8):
        drive.step()
    drive.step(after_s=2.0)
    assert preempted(drive) == {("lease", "interactive"): 1}


def test_a_step_that_does_not_fit_the_device_costs_its_latest_rows_their_blocks():
    drive = driver(200, lag=0, device={})
    drive.send(*[generate_request(f"r{i}", TEXT[i:], 30, tier=("interactive", "batch")[i % 2]) for i in range(4)])
    for _ in range(6):
        drive.step()
    drive.runner.fail_launch = DeviceOutOfMemory("full")
    drive.step()
    assert {cause for cause, _ in preempted(drive)} == {"memory"}


def test_preemptions_are_shown_by_cause_and_tier_and_every_pair_has_its_series_from_the_start():
    drive = grown_together()
    value = observed(drive, 21).registry.get_sample_value
    shown = {
        (cause, tier): value("headgate_preemptions_total", {"cause": cause, "tier": tier})
        for cause in CAUSES
        for tier in ("interactive", "batch")
    }
    happened = preempted(drive)
    assert happened
    assert shown == {pair: happened.get(pair, 0) for pair in shown}


def test_each_block_is_in_one_state():
    drive = driver(host={"num_slots": 32, "delay": lambda: 2}, preempt="swap")
    moved = 0
    for number in range(4):
        drive.send(*[generate_request(f"r{number}-{i}", TEXT[i:], 40, tenant=f"t{i}") for i in range(5)])
        for _ in range(60):
            blocks = drive.step(after_s=1.1).cache.blocks
            assert sum(blocks.values()) == 63
            assert min(blocks.values()) >= 0
            moved += blocks["moving"]
    drive.run()
    blocks = drive.step(after_s=1.1).cache.blocks
    assert (blocks["held"], blocks["private"], blocks["moving"]) == (0, 0, 0)
    assert moved, "no block was ever seen on its way"


def test_blocks_of_a_sequence_are_private_until_the_tree_holds_them():
    drive = driver()
    drive.send(generate_request("r", TEXT[:10], 20))
    drive.step(after_s=1.1)
    (sequence,) = drive.attempt("r").sequences
    drive.step(after_s=1.1)
    blocks = drive.outputs[-1].cache.blocks
    assert blocks["held"] == sequence.handle.num_tree_blocks == 2
    assert blocks["private"] == len(sequence.block_ids) - 2 == 1


def test_an_attempt_that_fails_its_step_is_counted():
    class Poisoned(ScriptedRunner):
        def execute(self, rows):
            if any(255 in row.tokens for row in rows):
                raise RuntimeError("poison")
            return super().execute(rows)

    drive = Driver(Poisoned(num_blocks=64, block_size=4))
    drive.send(generate_request("good", TEXT, 4), generate_request("bad", [*TEXT, 255], 4, tenant="mallory"))
    drive.run()
    assert drive.endings[LINK, "good"].reason == "length"
    value = observed(drive).registry.get_sample_value
    assert value("headgate_poisoned_attempts_total", {"model_name": "m", "engine": "0"}) == 1


@pytest.mark.parametrize("traceparent", [f"00-{TRACE}-{'a' * 16}-00", "", "garbage", f"00-{'0' * 32}-{'a' * 16}-01"])
def test_only_a_sampled_request_leaves_an_exemplar(traceparent):
    drive = driver()
    drive.send(generate_request("sampled", TEXT, 6, traceparent=f"00-{'b' * 32}-{'c' * 16}-01"))
    drive.send(generate_request("other", TEXT[3:], 6, traceparent=traceparent))
    drive.run()
    registry = observed(drive).registry
    traces = exemplars(expose(registry, OPENMETRICS).body.decode())
    assert set(traces) == set(TIMES)
    assert {trace for found in traces.values() for trace in found} == {"b" * 32}
    assert b"trace_id" not in expose(registry, "text/plain").body


def exemplars(page: str) -> dict[str, list[str]]:
    """The trace ids by family, as a strict reader of OpenMetrics takes them; each lies in its bucket."""
    found: dict[str, list[str]] = {}
    for family in openmetrics(page):
        below = float("-inf")
        for sample in family.samples:
            if sample.exemplar is not None:
                bound = float(sample.labels["le"])
                assert below < sample.exemplar.value <= bound
                found.setdefault(family.name, []).append(sample.exemplar.labels["trace_id"])
            below = float(sample.labels["le"]) if sample.name.endswith("_bucket") else float("-inf")
    return found


def series(page: bytes) -> set[str]:
    lines = (line for line in page.decode().splitlines() if not line.startswith("#"))
    return {re.sub(r" [^ ]+( #.*)?$", "", line) for line in lines}


def test_attack_F07_hostile_models_tenants_and_traces_make_no_series_of_a_worker():
    drive = driver()
    drive.send(generate_request("r", TEXT, 6, traceparent=f"00-{'b' * 32}-{'c' * 16}-01"))
    drive.run()
    metrics = observed(drive)
    (attempt,) = [attempt for output in drive.outputs for attempt in output.ended]
    before = series(expose(metrics.registry, OPENMETRICS).body)
    fields = ("request_id", "model", "adapter", "tenant", "traceparent")
    for number in range(NUM_HOSTILE // len(fields)):
        attempt.message = msgspec.structs.replace(attempt.message, **dict.fromkeys(fields, f'{number}"}}\n'))
        metrics._attempts.ended(attempt)
        metrics._cache.ended(attempt)
    assert series(expose(metrics.registry, OPENMETRICS).body) == before
