"""Objects of `/admin/v1/workers`: what a gateway knows of its linked workers. The module holds shapes only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from workers.protocol.messages import Hello
from workers.protocol.registry import Registration
from workers.protocol.reports import (
    AdapterState,
    EngineReport,
    KernelReport,
    StepReport,
    StepTimes,
    TenantReport,
    WorkerStatus,
)

LEAST_STEPS = 8
"""The worker predicts nothing from fewer steps."""


class LinkedWorker(NamedTuple):
    """The messages of a worker on its link to this gateway."""

    registration: Registration
    hello: Hello
    status: WorkerStatus
    report: EngineReport
    state: str
    num_calls: int
    """Requests that this gateway has sent and that have not ended."""


def drained(registration: Registration, status: WorkerStatus, others: Iterable[LinkedWorker]) -> dict[str, Any]:
    """Returns what a worker still runs, and how many other workers take requests for its model."""
    model = registration.model
    return {
        "id": registration.worker,
        "object": "worker.drain",
        "model": model,
        "running": status.running,
        "num_others_ready": sum(one.registration.model == model and one.state == "ready" for one in others),
    }


def worker(link: LinkedWorker) -> dict[str, Any]:
    """Returns a linked worker without its steps and tenants."""
    hello, status, report = link.hello, link.status, link.report
    num_blocks = max(0, hello.num_blocks - 1)  # block 0 is no tenant's
    return {
        "id": link.registration.worker,
        "object": "worker",
        "model": link.registration.model,
        "state": link.state,
        "draining": status.draining,
        "address": link.registration.address,
        "process": hello.process,
        "protocol_version": hello.version,
        "root": hello.root,
        "max_model_len": hello.max_model_len,
        "max_running": hello.max_running,
        "running": status.running,
        "waiting": status.waiting,
        "waiting_tokens": status.waiting_tokens,
        "requests_of_this_gateway": link.num_calls,
        "predicted_wait_ms": report.wait_ms,
        "last_step_age_ms": status.last_step_age_ms,
        "prefill_tokens_per_s": round(status.prefill_rate, 1),
        "decode_tokens_per_s": round(status.decode_rate, 1),
        "step_time": _step_time(report.step_times),
        "blocks": {
            "size": hello.block_size,
            "total": num_blocks,
            "held": max(0, num_blocks - status.free_blocks - status.evictable_blocks),
            "evictable": status.evictable_blocks,
            "free": status.free_blocks,
            "pinned": report.pinned_blocks,
        },
    }


def worker_in_detail(link: LinkedWorker, adapters: Iterable[AdapterState]) -> dict[str, Any]:
    report = link.report
    return worker(link) | {
        "cache": cache(report),
        "kernels": [_kernel(one) for one in report.kernels],
        "graphs": [{"num_rows": one.num_rows, "state": one.state} for one in report.graphs],
        "steps": [_step(one) for one in report.steps],
        "tenants": [_tenant(one) for one in report.tenants],
        "adapters": [{"name": one.name, "state": one.state, "reason": one.reason or None} for one in adapters],
    }


def registered(one: Registration, why: str | None) -> dict[str, Any]:
    """Returns a worker that is registered and not linked, and why the link was refused, if it was."""
    return {"id": one.worker, "model": one.model, "address": one.address, "refused": why}


def cache(report: EngineReport) -> dict[str, Any]:
    """Returns the state of a worker's prefix cache. Evicted blocks are counted since its process began."""
    return {"nodes": report.cache_nodes, "evicted_blocks": dict(sorted(report.evicted_blocks.items()))}


def _step_time(seen: StepTimes) -> dict[str, Any] | None:
    """Returns what a step costs: fixed milliseconds, and microseconds for each token and each KV token that is read."""
    if seen.num_steps < LEAST_STEPS:
        return None
    return {
        "num_steps": seen.num_steps,
        "fixed_ms": round(seen.fixed_s * 1e3, 4),
        "token_us": round(seen.token_s * 1e6, 4),
        "kv_token_us": round(seen.kv_token_s * 1e6, 4),
    }


def _kernel(one: KernelReport) -> dict[str, Any]:
    return {"op": one.op, "implementation": one.implementation, "state": one.state}


def _step(one: StepReport) -> dict[str, Any]:
    return {
        "step": one.step,
        "age_ms": one.age_ms,
        "execute_ms": one.execute_us / 1000,
        "num_sequences": one.num_sequences,
        "num_prefill_tokens": one.num_prefill_tokens,
        "num_decode_tokens": one.num_decode_tokens,
    }


def _tenant(one: TenantReport) -> dict[str, Any]:
    return {
        "project_id": one.tenant,
        "weight": one.weight,
        "running": one.running,
        "waiting": one.waiting,
        "oldest_wait_ms": one.oldest_wait_ms,
        "held_blocks": one.held_blocks,
        "retained_blocks": one.retained_blocks,
        "pinned_blocks": one.pinned_blocks,
        "evicted_blocks": one.evicted_blocks,
    }
