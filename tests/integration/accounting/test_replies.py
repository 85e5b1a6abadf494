"""Keys of tenants in SQL: room, several postings behind one answer, and what is swept. Keys of lines: integration/jobs."""

from __future__ import annotations

import pytest
from money import RATES, posting
from sqlalchemy import text

from accounting.access import api_keys
from accounting.prices import prices
from accounting.requests import idempotency_store as replies
from accounting.requests import request_postings
from accounting.tenants import tenants

NOW = 1_700_000_000


@pytest.fixture
async def owner(conn, pepper) -> dict[str, str]:
    await prices.bootstrap(conn, {"m": {"interactive": RATES}}, 0)
    tenant = (await tenants.create(conn, "a", now=1)).id
    key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1)
    return {"tenant_id": tenant, "key_id": key.info.id}


async def take(conn, owner, key: str, now: int = NOW, slot: int = 0):
    return await replies.take(
        conn, owner["tenant_id"], key, fingerprint=b"f", request_id=f"req_{key}", slot=slot, now=now
    )


async def store(conn, owner, key: str, num: int = 1, body: bytes = b"sealed") -> bool:
    names = [f"req_{key}", *(f"req_{key}_{n}" for n in range(1, num))]
    return await replies.store(
        conn,
        owner["tenant_id"],
        key,
        request_id=names[0],
        status=200,
        body=body,
        postings=[posting(name, **owner) for name in names],
        content_type="text/event-stream",
    )


async def test_all_postings_of_an_answer_are_found_until_they_are_in_the_ledger(conn, owner):
    assert await take(conn, owner, "k") is None
    assert await store(conn, owner, "k", 3)
    assert await store(conn, owner, "k", 3), "storing twice is storing once"
    names = {"req_k", "req_k_1", "req_k_2"}
    assert set(await replies.postings(conn, [*names, "req_other"])) == names
    known = await take(conn, owner, "k")
    assert known.stored.content_type == "text/event-stream"

    async def owed() -> set[str]:
        found = await replies.owed(conn, owner["tenant_id"], "k", known.stored)
        return {one.request_id for one in found}

    assert await owed() == names
    await request_postings.post(conn, 3, 8, [posting("req_k_1", **owner)])
    assert await owed() == names - {"req_k_1"}
    await request_postings.post_unshipped(conn, await replies.owed(conn, owner["tenant_id"], "k", known.stored))
    assert await owed() == set()
    assert await request_postings.journal_offset(conn, 3) == 8, "nobody's offset has moved"


async def test_a_charge_that_sql_refuses_keeps_no_answer_back(conn, owner, caplog):
    """It is logged, and everything else of the answer is charged."""
    refused = posting("req_bad", **owner, opened_at_ms=2**70)
    good = [posting(f"req_{number}", **owner) for number in range(3)]
    await request_postings.post_unshipped(conn, [good[0], refused, *good[1:]])
    rows = await conn.execute(text("SELECT request_id FROM ledger_entry WHERE kind = 'settle' ORDER BY request_id"))
    assert rows.scalars().all() == ["req_0", "req_1", "req_2"]
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "CRITICAL"]
    assert "req_bad" in line


async def test_what_is_not_ours_is_not_stored(conn, owner):
    assert not await store(conn, owner, "k")
    await take(conn, owner, "k")
    await replies.drop(conn, owner["tenant_id"], "k", "req_k")
    assert not await store(conn, owner, "k", 2)
    assert (await conn.execute(text("SELECT 1 FROM idempotent_posting"))).first() is None


async def test_room_is_counted_by_keys_and_bytes_and_comes_back(conn, owner, monkeypatch):
    monkeypatch.setattr(replies, "MAX_KEYS", 2)
    await take(conn, owner, "a")
    await take(conn, owner, "b", NOW + 5)
    with pytest.raises(replies.NoRoom) as refusal:
        await take(conn, owner, "c")
    assert (refusal.value.what, refusal.value.limit, refusal.value.used) == ("keys", 2, 2)
    assert refusal.value.until == NOW + replies.KEEP_S
    assert (await take(conn, owner, "a")).stored is None, "a known key needs no room"
    await store(conn, owner, "a")
    assert await take(conn, owner, "c", NOW + replies.KEEP_S) is None
    monkeypatch.setattr(replies, "MAX_KEYS", 100)
    monkeypatch.setattr(replies, "MAX_BYTES", 3 * replies.RUNNING_BYTES + 10)
    assert await take(conn, owner, "d", NOW + replies.KEEP_S) is None
    with pytest.raises(replies.NoRoom) as refusal:
        await take(conn, owner, "e", NOW + replies.KEEP_S)
    assert refusal.value.what == "bytes"
    await store(conn, owner, "d", body=b"short")
    assert await take(conn, owner, "e", NOW + replies.KEEP_S) is None, "as much as it really took"


async def test_what_is_past_its_time_goes_with_all_its_postings(conn, owner):
    await take(conn, owner, "old")
    await store(conn, owner, "old", 2)
    await take(conn, owner, "running")
    await replies.purge(conn, NOW + replies.KEEP_S - 1)
    assert len(await replies.postings(conn, ["req_old", "req_old_1"])) == 2
    await replies.purge(conn, NOW + replies.KEEP_S)
    assert await replies.postings(conn, ["req_old", "req_old_1"]) == {}
    left = (await conn.execute(text("SELECT key FROM idempotent_reply"))).scalars().all()
    assert left == ["running"]


async def test_answers_that_are_past_their_time_go_in_pieces(conn, owner, monkeypatch):
    monkeypatch.setattr(replies, "PURGED_AT_ONCE", 2)
    for number in range(3):
        await take(conn, owner, f"k{number}", NOW - number)
        await store(conn, owner, f"k{number}")
    for left in (["k0"], []):
        assert await replies.purge(conn, NOW + replies.KEEP_S) == bool(left)
        assert (await conn.execute(text("SELECT key FROM idempotent_reply"))).scalars().all() == left


async def test_lost_claims_of_a_slot_are_dropped_and_held_young_or_others_are_not(conn, owner):
    for key, now, slot in (("lost", 0, 0), ("held", 0, 0), ("young", 60, 0), ("other", 0, 1)):
        await take(conn, owner, key, NOW + now, slot)
    await take(conn, owner, "stored")
    await store(conn, owner, "stored")
    await replies.drop_lost(conn, 0, {"req_held"}, NOW + 1)
    left = (await conn.execute(text("SELECT key FROM idempotent_reply ORDER BY key"))).scalars()
    assert left.all() == ["held", "other", "stored", "young"]
