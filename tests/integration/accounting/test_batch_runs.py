"""Which batch is validated or finalised next: a tenant with hundreds of batches does not keep the others waiting."""

from __future__ import annotations

import asyncio
import random
import uuid

import pytest
from sqlalchemy import func, select, text, update

from accounting.access import api_keys
from accounting.batches import batch_runs, batches, claims, files
from accounting.batches.batch_runs import Chunk
from accounting.tables.batch_models import Batch, BatchChunk, TenantTurn
from accounting.tenants import tenants
from accounting.values.errors import TooManyError

NOW_MS = 10_000_000


async def tenant_with_batches(conn, pepper, num: int, first_at: int) -> tuple[str, list[str]]:
    """A tenant whose batches share one input; each was created a second after the one before it."""
    tenant_id = (await tenants.create(conn, uuid.uuid4().hex, now=1)).id
    key = await api_keys.create(conn, pepper, tenant_id=tenant_id, now=1)
    source = await files.create(
        conn, tenant_id, purpose="batch", name="in", num_bytes=1, sha256="0", storage_key=uuid.uuid4().hex, now=1
    )
    made = [
        await batches.create(
            conn,
            tenant_id,
            key.info.id,
            input_file_id=source.id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
            now=first_at + number,
        )
        for number in range(num)
    ]
    return tenant_id, [batch.id for batch in made]


async def test_a_tenant_with_many_batches_does_not_keep_the_others_waiting(conn, pepper):
    await tenant_with_batches(conn, pepper, 60, first_at=100)
    _, [other] = await tenant_with_batches(conn, pepper, 1, first_at=1000)
    random.seed(1)
    claimed = []
    for _ in range(20):
        held = await batch_runs.claim(conn, NOW_MS, 60_000, 30_000)
        assert held is not None
        claimed.append(held.batch_id)
    assert other in claimed  # each claim takes it with one half


async def test_tenants_get_the_same_share_and_each_its_oldest_batch_first(conn, pepper):
    mine = dict([await tenant_with_batches(conn, pepper, num, first_at=100) for num in (40, 40)])
    random.seed(2)
    claimed: dict[str, list[str]] = {tenant_id: [] for tenant_id in mine}
    for _ in range(40):
        held = await batch_runs.claim(conn, NOW_MS, 60_000, 30_000)
        assert held is not None
        claimed[held.tenant_id].append(held.batch_id)
    for tenant_id, ids in claimed.items():
        assert len(ids) >= 8
        assert ids == mine[tenant_id][: len(ids)]


async def without_clever_plans(conn) -> None:
    """PostgreSQL plans as it does where it takes the table for a tiny one: one row after the other."""
    if conn.dialect.name == "postgresql":
        for kind in ("hashjoin", "mergejoin", "material", "hashagg", "sort"):
            await conn.execute(text(f"SET LOCAL enable_{kind} = off"))


async def test_a_claim_takes_one_batch_and_one_chunk_whatever_the_plan(conn, pepper):
    tenant_id, _ = await tenant_with_batches(conn, pepper, 12, first_at=100)
    await without_clever_plans(conn)
    held = await batch_runs.claim(conn, NOW_MS, 60_000, 30_000)
    claimed = select(func.count()).select_from(Batch).where(Batch.claimed_until_ms > NOW_MS)
    assert await conn.scalar(claimed) == 1
    chunks = [Chunk(1, 1, b"")] * 12
    await batch_runs.begin(conn, held, NOW_MS, model="m", num_total=12, chunks=chunks, faulty=[], errors=None)
    assert await claims.claim(conn, tenant_id, "me:", NOW_MS, 60_000) is not None
    claimed = select(func.count()).select_from(BatchChunk).where(BatchChunk.state == "claimed")
    assert await conn.scalar(claimed) == 1


async def test_no_batch_is_claimed_where_none_is_due(conn, pepper):
    await tenant_with_batches(conn, pepper, 1, first_at=100)
    assert await batch_runs.claim(conn, NOW_MS, 60_000, 30_000) is not None
    assert await batch_runs.claim(conn, NOW_MS, 60_000, 30_000) is None


async def test_chunks_are_claimed_by_expiry_age_and_place_and_postponed_ones_later(conn, pepper):
    tenant_id, ids = await tenant_with_batches(conn, pepper, 4, first_at=100)
    rng, order = random.Random(3), {}
    for batch_id in ids:
        expires_at = NOW_MS // 1000 + rng.choice((100, 200))
        await conn.execute(update(Batch).where(Batch.id == batch_id).values(expires_at=expires_at))
        held = await batch_runs.claim(conn, NOW_MS, 60_000, 30_000)
        chunks = [Chunk(rng.randint(1, 99), 1, b"")] * 5
        await batch_runs.begin(conn, held, NOW_MS, model="m", num_total=5, chunks=chunks, faulty=[], errors=None)
        order[batch_id] = (expires_at, ids.index(batch_id))
    later = [(batch_id, rng.randrange(5)) for batch_id in ids[:3]]
    for batch_id, seq in later:
        one = BatchChunk.batch_id == batch_id, BatchChunk.seq == seq
        await conn.execute(update(BatchChunk).where(*one).values(not_before_ms=NOW_MS + 1))
    found = []
    while waiting := await claims.waiting(conn, NOW_MS):
        held = await claims.claim(conn, tenant_id, "me", NOW_MS, 60_000)
        assert [one.predicted_tokens for one in waiting] == [held.predicted_tokens]
        found.append((held.batch_id, held.seq))
    wanted = [(batch_id, seq) for batch_id in sorted(ids, key=order.get) for seq in range(5)]
    assert found == [one for one in wanted if one not in later]
    assert await claims.num_claimable(conn, NOW_MS + 1, 100) == len(later)
    assert await claims.num_claimable(conn, NOW_MS + 1, 2) == 2


async def test_a_tenant_has_so_many_open_batches(conn, pepper, monkeypatch):
    """Each claim read the chunks of all of them, while nobody else could write."""
    monkeypatch.setattr(batches, "MAX_OPEN", 3)
    tenant_id, [first, *_] = await tenant_with_batches(conn, pepper, 3, first_at=100)
    batch = await batch_runs.get(conn, first)
    new = {"input_file_id": batch.input_file_id, "endpoint": batch.endpoint, "completion_window": "24h", "now": 200}
    with pytest.raises(TooManyError):
        await batches.create(conn, tenant_id, batch.key_id, **new)
    await tenant_with_batches(conn, pepper, 1, first_at=100)
    await conn.execute(update(Batch).where(Batch.id == first).values(state="failed"))
    await batches.create(conn, tenant_id, batch.key_id, **new)


async def test_turns_that_are_taken_at_once_all_count(db, pepper):
    """On PostgreSQL each claim wrote over what the others had taken meanwhile."""
    async with db.write() as conn:
        tenant_id, _ = await tenant_with_batches(conn, pepper, 1, first_at=100)
        held = await batch_runs.claim(conn, NOW_MS, 60_000, 30_000)
        chunks = [Chunk(10, 1, b"")] * 2
        await batch_runs.begin(conn, held, NOW_MS, model="m", num_total=2, chunks=chunks, faulty=[], errors=None)
        await claims.save_turns(conn, {tenant_id: 100}, {tenant_id: 1})

    async def take() -> None:
        async with db.write() as conn:
            [found] = await claims.waiting(conn, NOW_MS)
            await asyncio.sleep(0.1)
            assert await claims.claim(conn, tenant_id, "me", NOW_MS, 60_000)
            await claims.save_turns(conn, {tenant_id: found.deficit_tokens - 10}, {tenant_id: 2})

    async def correct() -> None:
        async with db.write() as conn:
            await asyncio.sleep(0.05)
            await claims.correct_turn(conn, tenant_id, 5)

    await asyncio.gather(take(), take(), correct())
    async with db.read() as conn:
        assert await conn.scalar(select(TenantTurn.deficit_tokens).where(TenantTurn.tenant_id == tenant_id)) == 75
