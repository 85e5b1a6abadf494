"""Stored responses in SQL, on both databases: chains, totals, the oldest that leave, expiry, and erasure."""

from __future__ import annotations

import time
from typing import Any

import pytest
from sqlalchemy import text

from accounting.access import api_keys
from accounting.lifecycle import erasure, tenant_status
from accounting.responses import runs, stored
from accounting.responses.stored import KEEP_S, StoredResponse
from accounting.tenants import tenants
from gateway.idempotency import idempotency

NOW = 1_700_000_000


@pytest.fixture
async def owner(conn, pepper) -> dict[str, str]:
    tenant = (await tenants.create(conn, "a", now=1)).id
    key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1)
    return {"tenant_id": tenant, "key_id": key.info.id}


def response(owner: dict[str, str], number: int, **more: Any) -> StoredResponse:
    values: dict[str, Any] = {"state": "completed", "request": b"r" * 10, "body": b"b" * 20, "created_at": NOW + number}
    return StoredResponse(id=f"resp_{number:04}", **owner, **values | more)


async def totals(conn, owner) -> tuple[int, int]:
    row = (await conn.execute(text("SELECT num_responses, num_bytes FROM response_total"))).one()
    counted = (await conn.execute(text("SELECT count(*), coalesce(sum(num_bytes), 0) FROM response"))).one()
    assert tuple(row) == tuple(counted), "the totals are the sums of the rows"
    return int(row[0]), int(row[1])


async def test_a_chain_comes_oldest_first_and_shows_a_gap(conn, owner):
    for number in range(5):
        before = f"resp_{number - 1:04}" if number else None
        await stored.insert(conn, response(owner, number, previous_id=before, num_before=number))
    await stored.insert(conn, response(owner, 9))
    found = await stored.chain(conn, owner["tenant_id"], "resp_0003", NOW + 5)
    assert [one.id for one in found] == ["resp_0000", "resp_0001", "resp_0002", "resp_0003"]
    assert await stored.remove(conn, owner["tenant_id"], "resp_0001", NOW + 5)
    assert not await stored.remove(conn, owner["tenant_id"], "resp_0001", NOW + 5)
    found = await stored.chain(conn, owner["tenant_id"], "resp_0003", NOW + 5)
    assert [one.id for one in found] == ["resp_0002", "resp_0003"]
    assert found[0].previous_id == "resp_0001"


async def test_nobody_finds_what_is_another_tenants_or_has_expired(conn, owner):
    await stored.insert(conn, response(owner, 0))
    other = (await tenants.create(conn, "b", now=1)).id
    assert await stored.find(conn, owner["tenant_id"], "resp_0000", NOW) is not None
    assert await stored.find(conn, other, "resp_0000", NOW) is None
    assert not await stored.remove(conn, other, "resp_0000", NOW)
    assert await stored.chain(conn, other, "resp_0000", NOW) == []
    assert await stored.find(conn, owner["tenant_id"], "resp_0000", NOW + KEEP_S) is None
    await stored.purge(conn, NOW + KEEP_S - 1)
    assert await totals(conn, owner) == (1, 30)
    await stored.purge(conn, NOW + KEEP_S)
    assert await totals(conn, owner) == (0, 0)


async def test_a_sweep_deletes_all_that_has_expired(db, pepper, monkeypatch):
    """A tenant that stored more than one piece in the time between two sweeps kept ever more."""
    monkeypatch.setattr(stored, "PURGED_AT_ONCE", 2)
    async with db.write() as conn:
        tenant = (await tenants.create(conn, "a", now=1)).id
        key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1)
        owner = {"tenant_id": tenant, "key_id": key.info.id}
        for number in range(7):
            await stored.insert(conn, response(owner, number, created_at=number))
        await stored.insert(conn, response(owner, 7, created_at=int(time.time())))
    await idempotency.sweep(db, 0, set())
    async with db.read() as conn:
        assert await totals(conn, owner) == (1, 30)


async def test_a_packet_of_events_that_comes_again_with_more_counts_once(conn, owner):
    """The COMMIT of the first one was unknown."""
    running = response(owner, 0, state="in_progress", is_background=True)
    await stored.insert(conn, running)
    for events in (b"12345", b"1234567"):
        await runs.first_events(conn, running, runs.Packet(1, events))
    assert await runs.events_after(conn, running.id, 0, 10) == [runs.Packet(1, b"1234567")]
    assert await totals(conn, owner) == (1, 37)


async def test_a_further_run_begins_without_the_events_of_the_one_before(conn, owner):
    await stored.insert(conn, response(owner, 0, state="queued", is_background=True, next_number=2))
    for now_ms in (0, runs.CLAIM_MS):
        run = await runs.claim(conn, "resp_0000", now_ms)
        if run.fence == 1:
            await runs.first_events(conn, run.response, runs.Packet(0, b"12345"))
        assert await runs.events_after(conn, "resp_0000", -1, 10) == [runs.Packet(0, b"12345")]
        assert await totals(conn, owner) == (1, 35)
        await runs.write(conn, run, runs.Packet(run.response.next_number, b"123"), run.response.next_number + 9, now_ms)
    assert [packet.first_number for packet in await runs.events_after(conn, "resp_0000", -1, 10)] == [0, 11]


async def test_the_oldest_leave_a_full_store_and_the_newest_and_running_stay(conn, owner, monkeypatch):
    monkeypatch.setattr(stored, "MAX_RESPONSES", 3)
    monkeypatch.setattr(stored, "MAX_BYTES", 100)
    await stored.insert(conn, response(owner, 0, state="in_progress", is_background=True))
    for number in range(1, 5):
        await stored.insert(conn, response(owner, number))
        assert (await totals(conn, owner))[0] <= 3
    assert {row.id for row in await conn.execute(text("SELECT id FROM response"))} == {
        "resp_0000",
        "resp_0003",
        "resp_0004",
    }
    await stored.insert(conn, response(owner, 5, body=b"b" * 1000))
    assert {row.id for row in await conn.execute(text("SELECT id FROM response"))} == {"resp_0000", "resp_0005"}
    await totals(conn, owner)


async def test_erasure_leaves_none(conn, owner):
    await stored.insert(conn, response(owner, 0))
    await tenant_status.archive(conn, owner["tenant_id"], now=NOW)
    report = await erasure.erase(conn, owner["tenant_id"], retention_days=0, now=NOW, actor="x")
    assert report.num_answers == 1
    assert (await conn.execute(text("SELECT count(*) FROM response"))).scalar() == 0


async def test_a_tenant_may_be_kept_from_storing(conn, owner):
    assert (await tenants.get(conn, owner["tenant_id"])).stores_responses
    changed = await tenants.set_stores_responses(conn, owner["tenant_id"], False, now=NOW)
    assert not changed.stores_responses
