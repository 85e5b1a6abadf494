"""Each equation holds for honest books and names the request where it does not."""

from __future__ import annotations

import pytest
from money import RATES, legs, posting, record
from sqlalchemy import insert, text

from accounting.access import api_keys
from accounting.books import books
from accounting.prices import prices
from accounting.requests import idempotency_store, request_postings
from accounting.tables.models import EngineRecordRow, LedgerEntry, LedgerLeg
from accounting.tenants import tenants
from accounting.values.types import Usage


@pytest.fixture
async def owner(conn, pepper) -> dict[str, str]:
    """A tenant with a key, as every posting must name."""
    await prices.bootstrap(conn, {"m": {"interactive": RATES}}, 0)
    tenant = (await tenants.create(conn, "a", now=1)).id
    key = await api_keys.create(conn, pepper, tenant_id=tenant, now=1)
    return {"tenant_id": tenant, "key_id": key.info.id}


@pytest.fixture(autouse=True)
async def honest(conn, owner):
    """Three settles, one of them with surplus, and a void."""
    endings = [posting(f"req_{n}", **owner) for n in range(3)]
    await request_postings.post(conn, 0, 1, [*endings, posting("req_3", kind="void", **owner)])
    usages = [Usage(16, 32, 5, 100), Usage(16, 32, 5, 100), Usage(16, 32, 5, 120), Usage(16, 32, 5, 7)]
    records = [record(f"req_{n}", usage, tenant_id=owner["tenant_id"]) for n, usage in enumerate(usages)]
    await request_postings.post_engine_records(conn, records)


async def failures(conn, **options) -> dict[str, tuple[str, ...]]:
    report = await books.verify(conn, **options)
    found = {equation.id: equation.failures for equation in report.equations if not equation.ok}
    assert report.ok == (not found)
    return found


async def entry(conn, **changes):
    """A row as no honest writer would write it."""
    values = {
        **(await conn.execute(text("SELECT * FROM ledger_entry WHERE request_id = 'req_0'"))).mappings().one(),
        "request_id": "req_bad",
        **changes,
    }
    await conn.execute(insert(LedgerEntry).values(**values))
    return values


async def test_honest_books_verify_and_say_how_much_they_checked(conn):
    report = await books.verify(conn)
    assert report.ok
    assert {e.id: e.num_checked for e in report.equations} == {
        "I1": 4,
        "I2": 6,
        "I4": 4,
        "I5": 6,
        "I8": 4,
        "I9": 0,
        "I15": 6,
        "I17": 0,
        "I18": 0,
        "I19": 0,
        "I20": 0,
        "I21": 0,
        "I22": 0,
        "I23": 3,
    }


async def test_an_ending_without_engine_record_breaks_conservation_unless_it_runs(conn, owner):
    await request_postings.post(conn, 0, 2, [posting("req_9", **owner)])
    assert await failures(conn) == {"I1": ("req_9",)}
    assert await failures(conn, running=["req_9"]) == {}


async def test_an_engine_record_without_ending_breaks_conservation_and_one_ending(conn, owner):
    await request_postings.post_engine_records(conn, [record("req_9", tenant_id=owner["tenant_id"])])
    assert await failures(conn) == {"I1": ("req_9",), "I4": ("req_9",)}
    assert await failures(conn, running={"req_9"}) == {}


async def test_more_billed_than_the_engine_counted_is_named(conn, owner):
    await request_postings.post(conn, 0, 2, [posting("req_9", Usage(0, 0, 0, 5), **owner)])
    await request_postings.post_engine_records(conn, [record("req_9", Usage(0, 0, 0, 4), tenant_id=owner["tenant_id"])])
    assert await failures(conn) == {"I1": ("req_9",)}


async def test_tokens_in_the_wrong_class_are_not_hidden_by_an_equal_sum(conn, owner):
    await request_postings.post(conn, 0, 2, [posting("req_9", Usage(5, 0, 0, 0), **owner)])
    await request_postings.post_engine_records(conn, [record("req_9", Usage(0, 5, 0, 0), tenant_id=owner["tenant_id"])])
    assert await failures(conn) == {"I1": ("req_9",)}


async def test_an_unbalanced_leg_is_named(conn):
    leg = {"request_id": "req_1", "kind": "settle", "attempt": 0, "account": "x", "unit": "tokens", "token_class": ""}
    await conn.execute(insert(LedgerLeg).values(**leg, amount=-1))
    assert await failures(conn) == {"I2": ("req_1",)}


async def test_legs_that_balance_but_disagree_with_their_entry_are_named(conn):
    leg = {"request_id": "req_1", "kind": "settle", "attempt": 0, "unit": "tokens", "token_class": ""}
    await conn.execute(insert(LedgerLeg).values(**leg, account="x", amount=-1))
    await conn.execute(insert(LedgerLeg).values(**leg, account="y", amount=1))
    assert await failures(conn) == {"I2": ("req_1",)}


@pytest.mark.parametrize(
    ("column", "moves"),
    [("account", {"tenant_receivable": "cash"}), ("token_class", {"output": "uncached", "uncached": "output"})],
)
async def test_money_on_another_account_or_of_another_class_than_its_entry_says_is_named(conn, column, moves):
    """It balances, and it is the right sum."""
    right = list(legs(await entry(conn)))
    wrong = [{**leg, column: moves.get(leg[column], leg[column])} if leg["unit"] != "tokens" else leg for leg in right]
    assert wrong != right
    await conn.execute(insert(LedgerLeg), wrong)
    assert (await failures(conn))["I2"] == ("req_bad",)


async def test_an_entry_without_legs_rollup_or_record_is_named(conn):
    await entry(conn)
    found = await failures(conn)
    assert (found["I1"], found["I2"]) == (("req_bad",), ("req_bad",))
    assert len(found["I8"]) == 3


async def test_a_charge_above_its_reservation_is_named(conn, owner):
    await request_postings.post(conn, 0, 2, [posting("req_9", reserved=1, **owner)])
    await request_postings.post_engine_records(conn, [record("req_9", tenant_id=owner["tenant_id"])])
    assert await failures(conn) == {"I5": ("req_9",)}


@pytest.mark.parametrize(
    ("table", "num_wrong"), [("rollup_minute", 1), ("rollup_hour", 1), ("rollup_day", 2), ("rollup_month", 1)]
)
async def test_a_rollup_that_is_not_the_sum_of_its_rows_is_named(conn, table, num_wrong, owner):
    await conn.execute(text(f"UPDATE {table} SET output = output + 1"))
    (names,) = (await failures(conn)).values()
    # A wrong day makes its month wrong too.
    assert len(names) == num_wrong
    assert owner["tenant_id"] in names[0]
    await conn.execute(text(f"DELETE FROM {table}"))
    assert list(await failures(conn)) == ["I8"]


async def test_rows_of_nobody_and_references_across_tenants_are_named(conn, owner, pepper):
    other = (await tenants.create(conn, "b", now=1)).id
    await request_postings.post(
        conn,
        0,
        2,
        [
            posting("req_nobody", kind="void", tenant_id="proj_none"),
            posting("req_key", kind="void", tenant_id=other, key_id=owner["key_id"]),
        ],
    )
    await conn.execute(
        insert(EngineRecordRow).values(
            request_id="req_1",
            attempt=1,
            worker="w",
            seq=9,
            tenant_id=other,
            root="r",
            posted_at_ms=0,
            cache_read=0,
            cache_write=0,
            uncached=0,
            output=0,
            speculated=0,
            recomputed=0,
            reason="",
        )
    )
    assert await failures(conn) == {"I15": ("req_1", "req_key", "req_nobody")}


async def test_I17_a_stored_answer_has_one_settle_behind_it(conn, owner):
    tenant_id = owner["tenant_id"]
    for number in (0, 3, 9):  # settled, void, of nobody
        name = f"req_{number}"
        await idempotency_store.take(conn, tenant_id, name, fingerprint=b"", request_id=name, slot=0, now=10**10)
        await idempotency_store.store(
            conn, tenant_id, name, request_id=name, status=200, body=b"", postings=[posting(name, **owner)]
        )
    assert await failures(conn) == {"I17": ("req_3", "req_9")}
    assert await failures(conn, running={"req_9"}) == {"I17": ("req_3",)}
