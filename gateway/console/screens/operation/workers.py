"""The workers: their pools and queues, one worker with its last steps, and its drain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from aiohttp import web

from gateway.console import charts, pages
from gateway.console.tables import Column, Table
from gateway.console.viewer import Viewer

PATH = "/admin/v1/workers"
UPSTREAMS = "/admin/v1/upstreams"
HELD = ("held", "evictable", "free")


async def list_workers(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    found = await viewer.get(PATH)
    bought = (await viewer.get(UPSTREAMS))["data"]
    workers = Table("workers", _COLUMNS, [_row(one) for one in found["data"]], _EMPTY)
    upstreams = Table("upstreams", _UPSTREAM_COLUMNS, [_upstream_row(one) for one in bought], "")
    return pages.show(
        request,
        viewer,
        "workers.html",
        tables=[workers, *([upstreams] if bought else [])],
        gateway=found["gateway"],
        unreachable=found["unreachable"],
        pools=[(one["id"], _pool(one["blocks"])) for one in found["data"]],
    )


async def show_worker(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    found = await _one(request, viewer)
    return pages.show(
        request,
        viewer,
        "worker.html",
        found=found,
        pool=_pool(found["blocks"]),
        steps=_steps(found["steps"]),
        slowest_ms=max((step["execute_ms"] for step in found["steps"]), default=None),
        tables=[
            Table("worker-tenants", _TENANT_COLUMNS, found["tenants"], "No tenant has anything in this worker."),
            Table("kernels", _KERNEL_COLUMNS, found["kernels"], "This worker reports no kernels."),
            Table("graphs", _GRAPH_COLUMNS, found["graphs"], "This worker records no steps, as on a CPU."),
        ],
    )


async def ask_drain(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Shows what a drain would do, before the form that asks for it."""
    found = await _one(request, viewer)
    others = [
        one["id"]
        for one in (await viewer.get(PATH))["data"]
        if one["model"] == found["model"] and one["id"] != found["id"] and one["state"] == "ready"
    ]
    return pages.show(request, viewer, "worker_drain.html", found=found, others=others)


async def drain(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    worker_id = pages.part(request, "id")
    await viewer.post(f"{PATH}/{worker_id}/drain", {})
    return pages.see_other(f"/workers/{worker_id}", asked="drain")


async def resume(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    worker_id = pages.part(request, "id")
    await viewer.post(f"{PATH}/{worker_id}/resume", {})
    return pages.see_other(f"/workers/{worker_id}", asked="resume")


async def _one(request: web.Request, viewer: Viewer) -> Any:
    return await viewer.get(f"{PATH}/{pages.part(request, 'id')}")


_EMPTY = "No worker is linked with this gateway. Start one with `headgate worker` or `headgate up`."
_COLUMNS = (
    Column("id", "Worker", "code", link=lambda row: f"{pages.ROOT}/workers/{quote(row['id'], safe='')}"),
    Column("state", "State", "state"),
    Column("model", "Model"),
    Column("running", "Running", "count"),
    Column("waiting", "Waiting", "count"),
    Column("predicted_wait_ms", "Predicted wait", "ms"),
    Column("held_share", "KV held", "share"),
    Column("blocks_total", "KV blocks", "count"),
    Column("last_step_age_ms", "Last step", "ms"),
    Column("fixed_ms", "Step, fixed", "ms"),
    Column("token_ms", "Step, per token", "ms"),
    Column("requests_of_this_gateway", "Of this gateway", "count"),
    Column("address", "Address", "code"),
    Column("root", "Root", "code"),
)
_UPSTREAM_COLUMNS = (
    Column("id", "Upstream", "code", link=lambda row: f"{pages.ROOT}/upstreams/{quote(row['id'], safe='')}"),
    Column("breaker", "Breaker", "state"),
    Column("kind", "API"),
    Column("served", "Models"),
    Column("running", "Running", "count"),
    Column("max_running", "At most", "count"),
    Column("first_token_ms", "First token", "ms"),
    Column("delivered", "Answered", "count"),
    Column("failed", "Failed", "count"),
    Column("url", "Address", "code"),
)
_TENANT_COLUMNS = (
    Column("project_id", "Tenant", "code"),
    Column("weight", "Weight"),
    Column("running", "Running", "count"),
    Column("waiting", "Waiting", "count"),
    Column("oldest_wait_ms", "Oldest wait", "ms"),
    Column("held_blocks", "Blocks in use", "count"),
    Column("retained_blocks", "Blocks evictable", "count"),
    Column("pinned_blocks", "Blocks pinned", "count"),
    Column("evicted_blocks", "Blocks lost", "count"),
)
_KERNEL_COLUMNS = (
    Column("op", "Operation", "code"),
    Column("implementation", "Implementation"),
    Column("state", "Compared with its twin"),
)
_GRAPH_COLUMNS = (
    Column("num_rows", "Decode steps of up to so many rows", "count"),
    Column("state", "Recording compared with the call"),
)


def _row(one: Mapping[str, Any]) -> dict[str, Any]:
    blocks, step_time = one["blocks"], one["step_time"] or {}
    token_us = step_time.get("token_us")
    return {
        **one,
        "held_share": blocks["held"] / blocks["total"] if blocks["total"] else None,
        "blocks_total": blocks["total"],
        "fixed_ms": step_time.get("fixed_ms"),
        "token_ms": None if token_us is None else token_us / 1000,
    }


def _upstream_row(one: Mapping[str, Any]) -> dict[str, Any]:
    """Counts attempts since the gateway's start. A reason stands beside a breaker that is not closed."""
    ends: Mapping[str, int] = one["attempts"]
    reason = one["breaker_reason"]
    return {
        **one,
        "breaker": f"{one['breaker']} ({reason})" if reason else one["breaker"],
        "served": ", ".join(one["models"]),
        "delivered": ends.get("delivered", 0),
        "failed": sum(count for end, count in ends.items() if end not in ("delivered", "cut")),
    }


def _pool(blocks: Mapping[str, int]) -> Sequence[charts.Slice]:
    return charts.line_of([(name, blocks[name]) for name in HELD])


def _steps(steps: Sequence[Mapping[str, Any]]) -> charts.Bars | None:
    """Returns the bars of the last steps by their milliseconds, divided as their tokens are."""
    if not steps:
        return None
    values = []
    for step in steps:
        tokens = step["num_prefill_tokens"] + step["num_decode_tokens"] or 1
        prefill = step["execute_ms"] * step["num_prefill_tokens"] / tokens
        label = (
            f"step {step['step']}: {step['execute_ms']:.1f} ms, {step['num_sequences']} sequences,"
            f" {step['num_prefill_tokens']} prompt and {step['num_decode_tokens']} output tokens"
        )
        values.append((label, {"prompt tokens": prefill, "output tokens": step["execute_ms"] - prefill}))
    below = [str(step["step"]) for step in steps]
    return charts.stacked(values, ("prompt tokens", "output tokens"), lambda ms: f"{ms:,.0f} ms", below)


ROUTES = [
    pages.get("/workers", list_workers),
    pages.get("/workers/{id}", show_worker),
    pages.get("/workers/{id}/drain", ask_drain),
    pages.post("/workers/{id}/drain", drain),
    pages.post("/workers/{id}/resume", resume),
]
