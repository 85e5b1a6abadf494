"""What gateways are told of a worker: the last steps, the busiest tenants, both bounded."""

from cache.blocks.usage import TenantBlocks
from workers.engine.reports.cache_watch import CacheFigures
from workers.engine.reports.engine_report import EngineReporter
from workers.engine.values.plan import GraphState, KernelState
from workers.engine.values.queue_figures import QueueFigures, TenantQueue
from workers.engine.values.record import StepRecord
from workers.protocol.reports import MAX_REPORTED_STEPS, MAX_REPORTED_TENANTS, GraphReport, KernelReport, StepReport


def test_the_busiest_tenants_are_told_and_the_others_left_out():
    reporter = EngineReporter([])
    blocks = {f"idle-{number:04d}": TenantBlocks(num_retained=number) for number in range(1000)}
    queues = {"waits": TenantQueue(2.0, 0, 3, 0.25), "runs": TenantQueue(1.0, 1)}
    reporter.observe([], CacheFigures(tenants=blocks), QueueFigures(tenants=queues))
    reporter.observe([], None, None)
    told = reporter.report(now=5.0).tenants
    assert [one.tenant for one in told[:3]] == ["waits", "runs", "idle-0999"]
    assert (told[0].weight, told[0].waiting, told[0].oldest_wait_ms) == (2.0, 3, 250)
    assert told[2].retained_blocks == 999
    assert len(told) == MAX_REPORTED_TENANTS


def test_the_last_steps_are_told_with_their_age_and_kernels_stay():
    reporter = EngineReporter([KernelState("attention", "triton", "equal")], [GraphState(8, "differs")])
    steps = [
        StepRecord(n, num_seqs=2, num_decode_seqs=1, num_prefill_tokens=n, execute_s=0.002, collected_at=float(n))
        for n in range(MAX_REPORTED_STEPS + 5)
    ]
    reporter.observe(steps, None, None)
    told = reporter.report(now=100.0)
    assert len(told.steps) == MAX_REPORTED_STEPS
    assert told.steps[0] == StepReport(5, 95_000, 2000, 2, 5, 1)
    assert told.kernels == (KernelReport("attention", "triton", "equal"),)
    assert told.graphs == (GraphReport(8, "differs"),)
