"""`/admin/v1/workers`: what gateways know of a worker, and the drain that they ask for."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
import redis.asyncio
from click.testing import CliRunner
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, until
from load import stretched

from gateway.cli.main import main
from gateway.generation.stream import GENERATION
from workers.protocol import registry

PATH = "/admin/v1/workers"


async def call(gateway: RunningGateway, method: str, path: str, key: str | None = None) -> tuple[int, dict[str, Any]]:
    async with gateway.session(key or gateway.keys.admin_key) as session, session.request(method, path) as answer:
        return answer.status, await answer.json()


async def answer(gateway: RunningGateway, max_tokens: int = 20) -> None:
    async with gateway.client() as client:
        await client.completions.create(model=MODEL, prompt="twenty tokens, please, and no less", max_tokens=max_tokens)


async def test_a_worker_tells_its_pool_its_steps_and_who_has_what(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    await answer(gateway)
    link = gateway.app[GENERATION].fleet.links[0]
    await until(lambda: link.report.step_times.num_steps == worker.engine.scheduler.budget.step_time.num_steps >= 8)
    await until(lambda: link.report.tenants)
    status, page = await call(gateway, "GET", PATH)
    assert (status, page["gateway"]) == (200, 0)
    (one,) = page["data"]
    assert (one["id"], one["model"], one["state"], one["draining"]) == (worker.worker, MODEL, "ready", False)
    assert (one["root"], one["address"]) == (worker.runner.root, worker.address)
    blocks, engine = one["blocks"], worker.engine
    assert blocks["total"] == worker.runner.num_blocks - 1
    assert blocks["held"] + blocks["free"] + blocks["evictable"] == blocks["total"]
    assert one["step_time"]["num_steps"] == engine.scheduler.budget.step_time.num_steps

    status, one = await call(gateway, "GET", f"{PATH}/{worker.worker}")
    assert status == 200
    assert sum(step["num_prefill_tokens"] for step in one["steps"]) == len("twenty tokens, please, and no less")
    assert sum(step["num_decode_tokens"] for step in one["steps"]) == 19
    (tenant,) = one["tenants"]
    assert tenant["project_id"] == gateway.keys.tenant_id
    assert (tenant["running"], tenant["waiting"]) == (0, 0)
    assert tenant["retained_blocks"] == blocks["evictable"] > 0
    assert one["cache"]["nodes"] == engine.cache.num_nodes > 0


async def test_a_drained_worker_finishes_what_runs_and_takes_nothing_new(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    client = gateway.client()
    stream = await client.completions.create(model=MODEL, prompt="go on", max_tokens=60, stream=True)
    pieces = [await anext(stream)]
    status, body = await call(gateway, "POST", f"{PATH}/{worker.worker}/drain")
    assert status == 200, body
    assert (body["id"], body["model"], body["num_others_ready"]) == (worker.worker, MODEL, 0)
    link = gateway.app[GENERATION].fleet.links[0]
    await until(lambda: link.status.draining)
    assert gateway.app[GENERATION].fleet.draining == [worker.worker]
    assert (await call(gateway, "GET", PATH))[1]["data"][0]["state"] == "draining"
    async with (
        gateway.session() as session,
        session.post("/v1/completions", json={"model": MODEL, "prompt": "x"}) as no,
    ):
        assert (no.status, (await no.json())["error"]["code"]) == (503, "no_worker")
    pieces += [piece async for piece in stream]
    await client.close()
    assert pieces[-1].choices[0].finish_reason == "length"
    events = await gateway.sql("SELECT object_id FROM audit_log WHERE event = 'headgate.worker.drained'")
    assert [row[0] for row in events] == [worker.worker]


async def test_a_drain_that_is_taken_back_lets_requests_in_again(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    link = gateway.app[GENERATION].fleet.links[0]
    began = asyncio.get_running_loop().time()
    for verb, is_draining in (("drain", True), ("resume", False)) * 10:
        status, body = await call(gateway, "POST", f"{PATH}/{worker.worker}/{verb}")
        assert (status, body["object"]) == (200, f"worker.{verb}")
        await until(lambda wanted=is_draining: link.status.draining == wanted)
    assert asyncio.get_running_loop().time() - began < stretched(5), "it is told at once, not with the next beat"
    async with gateway.client() as client:
        answer = await client.completions.create(model=MODEL, prompt="x", max_tokens=3)
    assert answer.usage.completion_tokens == 3
    events = await gateway.sql("SELECT event FROM audit_log WHERE event LIKE 'headgate.worker.%' ORDER BY id")
    assert [row[0].split(".")[-1] for row in events] == ["drained", "resumed"] * 10


async def test_a_drain_at_the_command_line_says_what_runs_and_that_nobody_else_serves_the_model(
    gateway: RunningGateway, worker: ScriptedWorker
) -> None:
    command = ["workers", "drain", worker.worker, "--yes", "--home", str(gateway.settings.home)]
    env = {"HEADGATE_URL": gateway.url, "HEADGATE_API_KEY": gateway.keys.admin_key}
    done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
    assert (done.exit_code, done.stdout) == (0, f"{worker.worker} takes nothing new; 0 requests run on it.\n")
    assert f"Warning: No other worker of {MODEL} is ready" in done.stderr


async def test_a_worker_of_an_earlier_version_is_not_asked_to_take_a_drain_back(
    gateway: RunningGateway, worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the command for a drain."""
    link = gateway.app[GENERATION].fleet.links[0]
    monkeypatch.setattr(link, "hello", msgspec.structs.replace(link.hello, takes_over=False))
    status, body = await call(gateway, "POST", f"{PATH}/{worker.worker}/resume")
    assert (status, body["error"]["code"]) == (409, "worker_not_resumable")


async def test_a_worker_that_is_registered_and_gone_is_named_and_cannot_be_drained(
    bare_gateway: RunningGateway, redis_url: str
) -> None:
    gone = registry.Registration("worker-7", "p", "unix:/nowhere/w.sock", MODEL, "r", 1)
    async with redis.asyncio.from_url(redis_url) as client:
        await client.set(registry.worker_key(gone.worker), registry.encode(gone), ex=10)
        await client.sadd(registry.WORKERS, gone.worker)
    await until(lambda: bare_gateway.app[GENERATION].fleet.unreachable)
    page = (await call(bare_gateway, "GET", PATH))[1]
    assert page["data"] == []
    assert page["unreachable"] == [{"id": "worker-7", "model": MODEL, "address": gone.address, "refused": None}]
    for method, path in (("GET", f"{PATH}/worker-7"), ("POST", f"{PATH}/worker-7/drain")):
        status, body = await call(bare_gateway, method, path)
        assert (status, body["error"]["type"]) == (404, "invalid_request_error")
