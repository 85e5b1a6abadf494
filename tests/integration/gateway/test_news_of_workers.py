"""A worker that registers is announced, and gateways hear of it without looking."""

from __future__ import annotations

import asyncio

import redis.asyncio

from gateway.changes import hear_changes
from workers.engine.registration import keep_registered
from workers.protocol import registry
from workers.protocol.registry import Registration


async def test_gateways_hear_of_a_worker_that_registers(redis_url):
    client, heard = redis.asyncio.Redis.from_url(redis_url), asyncio.Event()
    other: list[str] = []
    hearing = asyncio.create_task(
        hear_changes(client, {registry.NEWS: [heard.set], "another": [lambda: other.append("")]})
    )
    async with asyncio.timeout(30):
        while not dict(await client.pubsub_numsub(registry.NEWS))[registry.NEWS.encode()]:  # noqa: ASYNC110 - Redis has no event
            await asyncio.sleep(0.01)
        registration = Registration("worker-0", "process", "unix:/none", "model", "root", 1)
        registering = asyncio.create_task(keep_registered(registration, redis_url))
        await heard.wait()
        assert registry.decode(await client.get(registry.worker_key("worker-0"))) == registration
    for task in (registering, hearing):
        task.cancel()
    await asyncio.gather(registering, hearing, return_exceptions=True)
    await client.aclose()
    assert other == []


async def test_a_worker_leaves_a_redis_that_became_a_replica(own_redis, monkeypatch):
    """It stayed on the demoted server, which refused its registration, until it was started again."""
    monkeypatch.setattr(registry, "REGISTRATION_REFRESH_S", 0.01)
    client = redis.asyncio.Redis.from_url(own_redis.url)
    registering = asyncio.create_task(
        keep_registered(Registration("worker-0", "process", "unix:/none", "model", "root", 1), own_redis.url)
    )

    async def others() -> set[str]:
        mine = str(await client.client_id())
        return {one["id"] for one in await client.client_list(_type="normal")} - {mine}

    async with asyncio.timeout(30):
        while not await client.exists(registry.WORKERS):  # noqa: ASYNC110 - Redis has no event
            await asyncio.sleep(0.01)
        before = await others()
        await client.execute_command("REPLICAOF", "127.0.0.1", "1")
        while before & await others():  # noqa: ASYNC110 - Redis has no event
            await asyncio.sleep(0.01)
    assert before
    registering.cancel()
    await asyncio.gather(registering, return_exceptions=True)
    await client.aclose()
