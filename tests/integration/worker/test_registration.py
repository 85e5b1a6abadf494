"""A worker's registration in Redis: it expires, it is taken back, and it belongs to one worker alone."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest
import redis
from fakes import MODEL, ROOT, ScriptedWorker, generate_request
from gateway_link import GatewayLink, until

from workers.protocol import registry
from workers.protocol.messages import Finished


async def test_a_worker_registers_with_an_expiry_and_deregisters_at_its_end(tmp_path, redis_url):
    client = redis.Redis.from_url(redis_url)
    async with ScriptedWorker(tmp_path / "w.sock", redis_url=redis_url, slot=3) as worker:
        key = registry.worker_key("worker-3")
        await until(lambda: client.get(key) is not None)
        found = registry.decode(client.get(key))
        assert (found.address, found.model, found.root) == (worker.address, MODEL, ROOT)
        assert found.pid == os.getpid()
        assert 0 < client.ttl(key) <= registry.REGISTRATION_TTL_S
    assert client.get(key) is None
    client.close()


async def test_a_worker_leaves_its_slot_to_one_that_runs_on_another_host(tmp_path, redis_url, monkeypatch):
    """The lock on the journal guards one machine. Both would be registered in turn, and one of them would serve nothing."""
    monkeypatch.setattr(registry, "REGISTRATION_REFRESH_S", 0.02)
    client, key = redis.Redis.from_url(redis_url), registry.worker_key("worker-0")

    def registered():
        value = client.get(key)
        return value and registry.decode(value).process

    async with ScriptedWorker(tmp_path / "here.sock", redis_url=redis_url) as here:
        await until(registered)
        async with ScriptedWorker(tmp_path / "there.sock", redis_url=redis_url) as there:
            await until(lambda: there._task.done())
            assert there.service.slot_is_taken
        assert registered() == here.service._hello.process
        async with await GatewayLink.dial(here.address) as gateway:
            gateway.send(generate_request("r"))
            await gateway.of(Finished)
        assert not here.service.slot_is_taken
    assert client.get(key) is None
    client.close()


async def test_a_worker_that_was_put_out_of_its_slot_meanwhile_ends(tmp_path, redis_url, monkeypatch):
    """As after a time without Redis, or beside a worker of a version that asks nobody."""
    monkeypatch.setattr(registry, "REGISTRATION_REFRESH_S", 0.02)
    client, key = redis.Redis.from_url(redis_url), registry.worker_key("worker-0")
    async with ScriptedWorker(tmp_path / "w.sock", redis_url=redis_url) as worker:
        await until(lambda: client.get(key) is not None)
        other = msgspec.structs.replace(registry.decode(client.get(key)), process="another")

        def refreshed():
            client.set(key, registry.encode(other), ex=registry.REGISTRATION_TTL_S)
            return worker._task.done()

        await until(refreshed)
        assert worker.service.slot_is_taken
    assert registry.decode(client.get(key)) == other
    client.close()


async def test_the_registration_of_a_worker_that_was_killed_is_waited_for(tmp_path, redis_url, monkeypatch):
    monkeypatch.setattr(registry, "REGISTRATION_REFRESH_S", 0.02)
    client, key = redis.Redis.from_url(redis_url), registry.worker_key("worker-0")
    left = registry.Registration("worker-0", "gone", "unix:/none", MODEL, ROOT, 1)
    client.set(key, registry.encode(left), px=300)
    async with ScriptedWorker(tmp_path / "w.sock", redis_url=redis_url) as worker:
        await until(lambda: client.get(key) not in (None, registry.encode(left)))
        assert not worker.service.slot_is_taken
    client.close()


async def test_a_worker_replaces_the_registration_of_its_own_predecessor_at_once(tmp_path, redis_url):
    client, key, journal = redis.Redis.from_url(redis_url), registry.worker_key("worker-0"), tmp_path / "journal"
    async with ScriptedWorker(tmp_path / "w.sock", journal_dir=journal) as before:
        left = registry.Registration("worker-0", before.service._hello.process, before.address, MODEL, ROOT, 1)
    client.set(key, registry.encode(left))  # it never expires
    async with ScriptedWorker(tmp_path / "w.sock", redis_url=redis_url, journal_dir=journal):
        await until(lambda: client.get(key) != registry.encode(left))
    client.close()


@pytest.mark.timeout(60)
async def test_a_worker_that_is_stopped_while_it_registers_ends(tmp_path, redis_url, monkeypatch):
    """Under Python 3.11 redis-py lost a cancellation that came just as a command was sent. The worker never ended."""
    monkeypatch.setattr(registry, "REGISTRATION_REFRESH_S", 0.0)
    for _ in range(20):
        async with ScriptedWorker(tmp_path / "w.sock", redis_url=redis_url):
            await asyncio.sleep(0.01)


async def test_a_worker_without_its_redis_serves_all_the_same(tmp_path):
    async with (
        ScriptedWorker(tmp_path / "w.sock", redis_url=f"unix://{tmp_path}/nobody.sock") as worker,
        await GatewayLink.dial(worker.address) as gateway,
    ):
        gateway.send(generate_request("r"))
        await gateway.of(Finished)
