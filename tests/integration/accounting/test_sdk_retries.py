"""A repeated attempt pays once; the books stay balanced, whatever order things arrive in."""

from __future__ import annotations

import asyncio

import pytest
from money import NOON_MS, RATES, posting, record
from sqlalchemy import text

from accounting.access import api_keys
from accounting.billing import credits
from accounting.billing.credits import NewCredit
from accounting.books import books
from accounting.prices import prices
from accounting.requests import label_usage, request_log, request_postings, sdk_retries
from accounting.requests.label_usage import LabelFilter
from accounting.requests.request_log import LoggedRequest
from accounting.requests.sdk_retries import DAY_MS, HOUR_MS, MAX_MOVED_OF_KEY, WITHIN_MS, DisconnectedEarly
from accounting.tenants import tenants
from accounting.values.errors import ConflictError
from accounting.values.types import Usage

PRINT = b"\1" * 32


async def _owner(conn, pepper) -> dict[str, str]:
    await prices.bootstrap(conn, {"m": {"interactive": RATES}}, 0)
    tenant = (await tenants.create(conn, "a", now=1)).id
    key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1)
    return {"tenant_id": tenant, "key_id": key.info.id}


@pytest.fixture
async def owner(conn, pepper) -> dict[str, str]:
    return await _owner(conn, pepper)


@pytest.fixture
def owner_of(pepper):
    async def make(db) -> dict[str, str]:
        async with db.write() as conn:
            return await _owner(conn, pepper)

    return make


async def unheard(conn, owner, number: int, at_ms: int = NOON_MS, print_: bytes = PRINT) -> None:
    name = f"req_{number}"
    await sdk_retries.note(conn, [DisconnectedEarly(name, name, owner["tenant_id"], owner["key_id"], print_, at_ms)])


async def settle(conn, owner, number: int, outcome: str = "client_gone") -> None:
    await request_postings.post(conn, 0, number + 1, [posting(f"req_{number}", outcome=outcome, **owner)])


async def replace(conn, owner, number: int, started_at_ms: int = NOON_MS + 1_000) -> int:
    return await sdk_retries.replace(conn, owner["key_id"], PRINT, f"req_{number}", started_at_ms)


async def billed(conn) -> tuple[int, int, int]:
    """(charge, tokens, requests) by the day's rollup."""
    row = (
        await conn.execute(
            text(
                "SELECT SUM(charge), SUM(cache_read + cache_write + uncached + output), SUM(num_requests) "
                "FROM rollup_day"
            )
        )
    ).one()
    return tuple(map(int, row))


async def kinds(conn, number: int) -> set[str]:
    query = text("SELECT kind FROM ledger_entry WHERE request_id = :name")
    return set((await conn.execute(query, {"name": f"req_{number}"})).scalars())


async def test_the_charge_of_a_repeated_attempt_becomes_a_write_off(conn, owner):
    one = posting("x", **owner)
    await settle(conn, owner, 1)
    await unheard(conn, owner, 1)
    await settle(conn, owner, 2, "ok")
    assert await replace(conn, owner, 2) == 1
    assert await sdk_retries.any_to_move(conn)
    assert await sdk_retries.move(conn) == ["req_1"]
    assert await sdk_retries.move(conn) == []
    assert not await sdk_retries.any_to_move(conn)
    assert await kinds(conn, 1) == {"settle", "reversal", "sdk_retry"}
    assert await billed(conn) == (one.charge.total, one.usage.total, 1)
    usages = [record(f"req_{n}", tenant_id=owner["tenant_id"]) for n in (1, 2)]
    await request_postings.post_engine_records(conn, usages)
    assert (await books.verify(conn)).ok


@pytest.mark.parametrize("late", [True, False])
async def test_the_engines_surplus_is_written_off_before_and_after(conn, owner, late):
    witness = record("req_1", Usage(16, 32, 5, 130), tenant_id=owner["tenant_id"])
    await settle(conn, owner, 1)
    if not late:
        await request_postings.post_engine_records(conn, [witness])
    await unheard(conn, owner, 1)
    await settle(conn, owner, 2, "ok")
    await replace(conn, owner, 2)
    await sdk_retries.move(conn)
    if late:
        await request_postings.post_engine_records(conn, [witness])
    await request_postings.post_engine_records(conn, [record("req_2", tenant_id=owner["tenant_id"])])
    report = await books.verify(conn)
    assert report.ok, report


async def test_it_waits_until_both_settlements_are_in_the_ledger(conn, owner):
    await unheard(conn, owner, 1)
    await replace(conn, owner, 2)
    assert await sdk_retries.move(conn) == []
    await settle(conn, owner, 2, "ok")
    assert await sdk_retries.move(conn) == []
    await settle(conn, owner, 1)
    assert await sdk_retries.move(conn) == ["req_1"]


async def test_a_repeat_that_is_not_charged_moves_nothing(conn, owner):
    await settle(conn, owner, 1)
    await unheard(conn, owner, 1)
    await replace(conn, owner, 2)
    await request_postings.post(conn, 0, 9, [posting("req_2", kind="void", outcome="internal", **owner)])
    assert await sdk_retries.move(conn) == []


async def test_two_attempts_of_one_fingerprint_at_most(conn, owner):
    for number in (1, 2, 3):
        await settle(conn, owner, number)
        await unheard(conn, owner, number, NOON_MS + number)
    await settle(conn, owner, 4, "ok")
    assert await replace(conn, owner, 4) == 2
    assert await replace(conn, owner, 5) == 0
    assert await sdk_retries.move(conn) == ["req_1", "req_2"]


async def repeated(conn, owner, number: int, at_ms: int = NOON_MS) -> int:
    """An attempt with a fingerprint of its own and its repeat. Returns how many engine requests are taken back."""
    name = number.to_bytes(32, "big")
    await unheard(conn, owner, 2 * number, at_ms, name)
    retry = f"req_{2 * number + 1}"
    return await sdk_retries.replace(conn, owner["key_id"], name, retry, at_ms + 1_000)


async def test_s8_a_new_fingerprint_each_time_gets_a_key_so_much_in_an_hour_and_no_more(conn, owner, pepper):
    taken = [await repeated(conn, owner, number) for number in range(MAX_MOVED_OF_KEY + 20)]
    assert taken == [1] * MAX_MOVED_OF_KEY + [0] * 20
    other = await api_keys.create(conn, pepper, tenant_id=owner["tenant_id"], now=1)
    assert await repeated(conn, owner | {"key_id": other.info.id}, 500) == 1
    assert await repeated(conn, owner, 600, NOON_MS + HOUR_MS + 1) == 1


async def test_s8_prompts_of_one_attempt_count_each(conn, owner):
    """One attempt may go past the bound; the next may not."""
    many = [
        DisconnectedEarly(f"p_{i}", "attempt", owner["tenant_id"], owner["key_id"], PRINT, NOON_MS)
        for i in range(MAX_MOVED_OF_KEY + 5)
    ]
    await sdk_retries.note(conn, many)
    assert await replace(conn, owner, 1) == len(many)
    assert await repeated(conn, owner, 7) == 0


async def test_s8_repeats_at_the_same_time_do_not_go_past_the_bound(db, owner_of):
    owner = await owner_of(db)

    at_once = asyncio.Semaphore(12)  # fewer than connections, for one of which the others would wait 5 s at most

    async def one(number: int) -> int:
        async with at_once, db.write() as conn:
            return await repeated(conn, owner, number)

    taken = await asyncio.gather(*(one(number) for number in range(MAX_MOVED_OF_KEY + 10)))
    assert sum(taken) == MAX_MOVED_OF_KEY


async def test_a_chain_of_repeats_pays_for_the_last(conn, owner):
    await settle(conn, owner, 1)
    await unheard(conn, owner, 1)
    await settle(conn, owner, 2)
    assert await replace(conn, owner, 2) == 1
    await unheard(conn, owner, 2, NOON_MS + 2_000)
    await settle(conn, owner, 3, "ok")
    assert await replace(conn, owner, 3, NOON_MS + 3_000) == 1
    assert await sdk_retries.move(conn) == ["req_1", "req_2"]


async def test_another_body_key_or_time_is_another_request(conn, owner):
    await settle(conn, owner, 1)
    await unheard(conn, owner, 1, print_=b"\2" * 32)
    await unheard(conn, owner, 2, NOON_MS - WITHIN_MS - 1)
    assert await replace(conn, owner, 3, NOON_MS) == 0
    assert await sdk_retries.replace(conn, "key_other", b"\2" * 32, "req_3", NOON_MS) == 0


async def test_what_nobody_repeats_is_forgotten_and_the_count_of_a_day_is_not(conn, owner):
    await unheard(conn, owner, 1)
    await replace(conn, owner, 2)
    await unheard(conn, owner, 3)
    await sdk_retries.forget(conn, NOON_MS + DAY_MS // 2)
    left = (await conn.execute(text("SELECT request_id FROM unheard_attempt"))).scalars().all()
    assert left == ["req_1"]
    await sdk_retries.forget(conn, NOON_MS + DAY_MS + 1)
    assert (await conn.execute(text("SELECT 1 FROM unheard_attempt"))).first() is None


async def test_a_reversal_needs_a_settle_and_happens_once(conn, owner):
    await request_postings.post(conn, 0, 1, [posting("req_0", kind="void", **owner)])
    await settle(conn, owner, 1)
    for _ in range(2):
        await request_postings.reverse(conn, ["req_0", "req_1", "req_9"], "sdk_retry")
    assert await kinds(conn, 0) == {"void"}
    assert await billed(conn) == (0, 0, 0)


async def correct(conn, owner, number: int, amount: int, kind: str = "adjustment") -> None:
    wanted = NewCredit(type=kind, tenant_id=owner["tenant_id"], amount=amount, corrects=f"req_{number}")
    await credits.create(conn, wanted, key=f"{kind} {number} {amount}", now_ms=NOON_MS + 9_000, actor="key_admin")


async def broken(conn) -> dict[str, tuple[str, ...]]:
    witnesses = [record(f"req_{n}", tenant_id=owner) for n, owner in await _settled(conn)]
    await request_postings.post_engine_records(conn, witnesses)
    return {e.id: e.failures for e in (await books.verify(conn)).equations if not e.ok}


async def _settled(conn) -> list[tuple[int, str]]:
    rows = await conn.execute(text("SELECT request_id, tenant_id FROM ledger_entry WHERE kind = 'settle'"))
    return [(int(name.removeprefix("req_")), tenant) for name, tenant in rows]


@pytest.mark.parametrize("kind", ["adjustment", "credit_note"])
async def test_a_charge_that_was_reversed_cannot_be_corrected(conn, owner, kind):
    await settle(conn, owner, 1)
    await unheard(conn, owner, 1)
    await settle(conn, owner, 2, "ok")
    await replace(conn, owner, 2)
    assert await sdk_retries.move(conn) == ["req_1"]
    with pytest.raises(ConflictError, match="taken back when its request was repeated"):
        await correct(conn, owner, 1, 1, kind)
    assert await kinds(conn, 1) == {"settle", "reversal", "sdk_retry"}
    assert await broken(conn) == {}


async def test_a_charge_that_was_corrected_is_not_reversed_and_its_rest_can_be_corrected(conn, owner):
    one = posting("x", **owner)
    for number in (1, 2):
        await settle(conn, owner, number)
        await unheard(conn, owner, number, NOON_MS + number)
    await correct(conn, owner, 1, 1)
    await settle(conn, owner, 3, "ok")
    assert await replace(conn, owner, 3) == 2
    assert await sdk_retries.move(conn) == ["req_2"]
    assert not await sdk_retries.any_to_move(conn)
    assert await kinds(conn, 1) == {"settle"}
    assert await billed(conn) == (2 * one.charge.total, 2 * one.usage.total, 2)
    await correct(conn, owner, 1, one.charge.total - 1)
    assert await broken(conn) == {}


async def test_i18_names_a_charge_that_was_corrected_and_reversed(conn, owner, monkeypatch):
    async def of_nobody(conn, request_ids):
        return set()

    monkeypatch.setattr(request_postings, "_corrected", of_nobody, raising=False)
    await settle(conn, owner, 1)
    await correct(conn, owner, 1, 1)
    assert await broken(conn) == {}
    await request_postings.reverse(conn, ["req_1"], "sdk_retry")
    assert await broken(conn) == {"I18": ("req_1",)}


async def log(conn, owner, *numbers: int) -> None:
    """Write rows of the request log, with their sums by label."""
    one = posting("x", **owner)
    rows = [
        LoggedRequest(
            request_id=f"req_{number}",
            is_tail=False,
            started_at_ms=NOON_MS,
            endpoint="POST /v1/chat/completions",
            model="m",
            end_user="maria",
            metadata={"team": "crops"},
            status=200,
            outcome="ok",
            prompt_tokens=one.usage.total - one.usage.output,
            cached_tokens=one.usage.cache_read,
            output_tokens=one.usage.output,
            charge=one.charge.total,
            currency="USD",
            **owner,
        )
        for number in numbers
    ]
    await label_usage.note(conn, rows)
    await request_log.add(conn, rows)


async def by_label(conn) -> set[tuple[int, int, int]]:
    """The (charge, tokens, requests) that the end user and the team of `log` have: one triple, where they agree."""
    found = set()
    for label in ("end_user", "metadata.team"):
        wanted = LabelFilter(label=label, since_ms=0, until_ms=2**45)
        [one] = await label_usage.list_sums(conn, wanted, 9)
        found.add((one.charge, one.prompt_tokens + one.output_tokens, one.num_requests))
    return found


async def repeat(conn, owner) -> None:
    """The first request was not heard of, and the second one is its repeat."""
    await settle(conn, owner, 1)
    await unheard(conn, owner, 1)
    await settle(conn, owner, 2, "ok")
    await replace(conn, owner, 2)


@pytest.mark.parametrize("first", [(1, 2), (2,), ()])
async def test_a_charge_that_is_taken_back_leaves_the_sums_by_label_whenever_its_row_comes(conn, owner, first):
    await repeat(conn, owner)
    await log(conn, owner, *first)
    assert await sdk_retries.move(conn) == ["req_1"]
    for _ in range(2):
        await log(conn, owner, 1, 2)
    assert await by_label(conn) == {await billed(conn)}


async def test_a_row_that_comes_while_its_charge_is_taken_back_leaves_the_sums_by_label(db, owner_of):
    owner = await owner_of(db)
    async with db.write() as conn:
        await repeat(conn, owner)

    async def move() -> None:
        async with db.write() as conn:
            assert await sdk_retries.move(conn) == ["req_1"]

    async with db.write() as conn:
        await log(conn, owner, 1, 2)
        moving = asyncio.create_task(move())
        done, _ = await asyncio.wait({moving}, timeout=1)
        assert not done, "it waits for the row"
    await moving
    async with db.read() as conn:
        assert await by_label(conn) == {await billed(conn)}


async def test_a_charge_that_was_corrected_stays_in_the_sums_by_label(conn, owner):
    await repeat(conn, owner)
    await log(conn, owner, 1, 2)
    await correct(conn, owner, 1, 1)
    assert await sdk_retries.move(conn) == []
    assert await by_label(conn) == {await billed(conn)}
