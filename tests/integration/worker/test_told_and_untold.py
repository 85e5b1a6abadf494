"""What a worker sends of its cache and its adapters, to whom, and to whom not."""

from __future__ import annotations

import pytest
from fakes import ScriptedWorker, encode, generate_request
from gateway_link import GatewayLink, until

from workers.engine import service
from workers.protocol.messages import AdapterCommand, CacheCommand, CacheEvent, DrainCommand, Failed, Finished
from workers.protocol.reports import AdapterReport, EngineReport, WorkerStatus

LONG = encode("a prompt of more than a group of tokens, " * 4)
ASK = CacheCommand("snapshot", key=b"k" * 32)


@pytest.fixture
async def worker(tmp_path, quick_beats):
    async with ScriptedWorker(tmp_path / "w.sock") as worker:
        yield worker


async def test_every_gateway_is_told_of_adapters_and_only_one_that_asked_of_the_cache(worker, tmp_path):
    (tmp_path / "adapter").write_text("poet")
    async with await GatewayLink.dial(worker.address) as other, await GatewayLink.dial(worker.address) as link:
        await link.of(AdapterReport, adapters=())
        link.send(AdapterCommand("load", "poet", str(tmp_path)))
        for each in (other, link):
            await each.until(lambda heard: any(m.adapters for m in heard if isinstance(m, AdapterReport)))
        other.send(generate_request("r", LONG))
        await other.of(Finished)
        assert not [m for m in other.heard if isinstance(m, CacheEvent)]


async def test_a_gateway_is_told_of_steps_and_may_drain(worker):
    async with await GatewayLink.dial(worker.address) as link:
        link.send(generate_request("r", LONG, 4, tenant="acme"))
        await link.of(Finished)
        await link.until(
            lambda heard: any(
                [one.tenant for one in m.tenants] == ["acme"]
                and sum(s.num_prefill_tokens for s in m.steps) == len(LONG)
                for m in heard
                if isinstance(m, EngineReport)
            )
        )
        link.send(DrainCommand())
        await link.until(lambda heard: any(m.draining for m in heard if isinstance(m, WorkerStatus)))
        link.send(generate_request("late", LONG))
        await link.of(Failed, request_id="late", code="draining")


@pytest.mark.parametrize(("name", "path"), [("", "/adapter"), ("poet", ""), ("poet", "adapter"), ("poet", "/a\0b")])
async def test_an_adapter_without_a_name_or_an_absolute_path_is_not_read(worker, monkeypatch, name, path):
    read = []
    monkeypatch.setattr(worker.service._adapters, "read", read.append)
    async with await GatewayLink.dial(worker.address) as link:
        link.send(AdapterCommand("load", name, path))
        link.send(AdapterCommand("load", "good", "/adapter"))
        await until(lambda: read)
    assert [command.name for command in read] == ["good"]


async def test_a_gateway_that_does_not_read_misses_events_and_sees_that_it_did(worker, monkeypatch):
    async with await GatewayLink.dial(worker.address) as link:
        link.send(ASK)
        await link.of(CacheEvent, reset=True)
        monkeypatch.setattr(service, "MAX_QUEUED_BYTES", -2)
        monkeypatch.setattr("workers.protocol.connection.Connection.abort", lambda _: None)
        link.send(generate_request("one", LONG))
        await link.of(Finished, request_id="one")
        monkeypatch.undo()
        told = [m for m in link.heard if isinstance(m, CacheEvent)]
        assert [m.reset for m in told] == [True]
        await link.until(lambda heard: any(m.cache_seq > told[0].seq for m in heard if isinstance(m, WorkerStatus)))
        link.send(ASK)
        snapshot = await link.until(
            lambda heard: next((m for m in heard if isinstance(m, CacheEvent) and m.inserted), None)
        )
        assert snapshot.reset
        await until(lambda: not worker.engine.attempts)
