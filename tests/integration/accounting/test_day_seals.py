"""Days are sealed once they are over; what changes afterwards is seen, and nothing is posted into them."""

from __future__ import annotations

import pytest
from money import NOON_MS, posting
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from accounting.books import books_billing, day_hashes
from accounting.ledger import ledger, rollups
from accounting.requests import request_postings

DAY_MS = 86_400_000
MIDNIGHT_MS = NOON_MS - DAY_MS // 2


@pytest.fixture
async def posted(conn):
    for number in range(3):
        at_ms = NOON_MS + number * DAY_MS
        await request_postings.post(conn, 0, number, [posting(f"req_{number}", opened_at_ms=at_ms)], now_ms=at_ms)
    return conn


async def days(conn) -> list[tuple[int, int]]:
    """(day relative to the first, rows) of each seal."""
    rows = await conn.execute(text("SELECT day, num_entries FROM day_seal ORDER BY day"))
    return [((row.day * 1000 - MIDNIGHT_MS) // DAY_MS, row.num_entries) for row in rows]


async def seal_all(conn, now_ms: int) -> list[day_hashes.Sealed]:
    """Seals every day that is over, oldest first."""
    sealed = []
    while (found := await day_hashes.draft(conn, now_ms)) is not None:
        sealed.append(await day_hashes.seal(conn, found, now_ms))
    return sealed


async def test_a_day_is_sealed_five_minutes_after_its_end(posted):
    end_ms = MIDNIGHT_MS + DAY_MS
    assert await seal_all(posted, end_ms + 299_999) == []
    await seal_all(posted, end_ms + 300_000)
    assert await days(posted) == [(0, 1)]
    await seal_all(posted, end_ms + 4 * DAY_MS)
    assert await days(posted) == [(0, 1), (1, 1), (2, 1), (3, 0)]
    assert (await books_billing.immutability(posted)).failures == ()


async def test_nothing_is_posted_into_a_sealed_day(posted):
    await seal_all(posted, MIDNIGHT_MS + 4 * DAY_MS)
    await request_postings.post(posted, 0, 9, [posting("req_late", opened_at_ms=NOON_MS)], now_ms=NOON_MS)
    when = await posted.scalar(text("SELECT posted_at_ms FROM ledger_entry WHERE request_id = 'req_late'"))
    assert when == MIDNIGHT_MS + 3 * DAY_MS
    assert (await books_billing.immutability(posted)).failures == ()


async def test_a_draft_is_void_once_a_row_was_posted_into_its_day(posted):
    found = await day_hashes.draft(posted, MIDNIGHT_MS + 4 * DAY_MS)
    await posted.execute(text("DELETE FROM journal_offset"))  # another poster's clock lags
    await request_postings.post(posted, 0, 9, [posting("req_late", opened_at_ms=NOON_MS)], now_ms=NOON_MS)
    assert await day_hashes.seal(posted, found, MIDNIGHT_MS + 4 * DAY_MS) is None
    await seal_all(posted, MIDNIGHT_MS + 4 * DAY_MS)
    assert await days(posted) == [(0, 2), (1, 1), (2, 1)]
    assert (await books_billing.immutability(posted)).failures == ()


async def test_a_day_that_another_gateway_sealed_meanwhile_is_not_sealed_again(posted):
    found = await day_hashes.draft(posted, MIDNIGHT_MS + 4 * DAY_MS)
    assert await day_hashes.seal(posted, found, MIDNIGHT_MS + 4 * DAY_MS) is not None
    assert await day_hashes.seal(posted, found, MIDNIGHT_MS + 4 * DAY_MS) is None
    assert await days(posted) == [(0, 1)]


async def test_a_clock_that_lags_posts_no_earlier_than_the_last_one(posted):
    assert await ledger.take_turn(posted, NOON_MS) == NOON_MS + 2 * DAY_MS


@pytest.mark.parametrize(
    "forgery",
    [
        "INSERT INTO ledger_leg SELECT request_id, kind, attempt, 'x' || account, unit, token_class, amount FROM ledger_leg"
        " WHERE request_id = 'req_1'",
        "UPDATE day_seal SET num_entries = 2",
        "UPDATE ledger_entry SET charge = charge + 1 WHERE request_id = 'req_1'",
        "DELETE FROM day_seal WHERE day = (SELECT min(day) FROM day_seal) + 86400",
    ],
)
async def test_what_changes_in_a_sealed_day_is_seen(db, forgery):
    async with db.write() as conn:
        for number in range(3):
            at_ms = NOON_MS + number * DAY_MS
            await request_postings.post(conn, 0, number, [posting(f"req_{number}", opened_at_ms=at_ms)], now_ms=at_ms)
        await seal_all(conn, MIDNIGHT_MS + 4 * DAY_MS)
    async with db.write() as conn:
        if not forgery.startswith("INSERT"):
            with pytest.raises(DBAPIError, match="append-only"):
                await conn.execute(text(forgery))
            await conn.rollback()
    async with db.write() as conn:
        # As somebody who may alter tables would.
        for table in ("ledger_entry", "day_seal"):
            for verb in ("update", "delete"):
                on = f" ON {table}" if db.dialect == "postgresql" else ""
                await conn.execute(text(f"DROP TRIGGER {table}_no_{verb}{on}"))
        await conn.execute(text(forgery))
        assert not (await books_billing.immutability(conn)).ok
        await conn.rollback()


@pytest.mark.parametrize(("span", "table", "num_wrong"), [("1h", "rollup_hour", 3), ("month", "rollup_month", 1)])
async def test_sealing_puts_rollups_right_and_says_which(posted, span, table, num_wrong):
    await posted.execute(text(f"UPDATE {table} SET output = output + 1"))
    sealed = await seal_all(posted, MIDNIGHT_MS + 4 * DAY_MS)
    wrong = [name for day in sealed for name in day.wrong_rollups]
    assert len(wrong) == num_wrong
    assert all(name.startswith(f"{span} bucket") for name in wrong)
    for span in rollups.SPANS:
        assert (await posted.execute(rollups.differing(posted, span))).all() == []
