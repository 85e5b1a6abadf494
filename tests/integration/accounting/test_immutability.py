"""Rows of the books are appended and never edited, whoever asks."""

from __future__ import annotations

import pytest
from money import RATES, posting, record
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from accounting.database import auth_epoch
from accounting.prices import prices
from accounting.requests import request_postings
from accounting.values.types import Usage


@pytest.fixture
async def books(db):
    async with db.write() as conn:
        await prices.bootstrap(conn, {"m": {"interactive": RATES}}, 1000)
        await auth_epoch.record(conn, "project.created", actor="system", now=1)
        await request_postings.post(conn, 0, 1, [posting("req_1", batch_id="batch_1", line_no=1)])
        await request_postings.post_engine_records(conn, [record("req_1", Usage(16, 32, 5, 120))])
    return db


TABLES = {
    "ledger_entry": "charge = 0",
    "ledger_leg": "amount = 0",
    "engine_record": "output = 0",
    "audit_log": "actor = ''",
    "batch_charge": "request_id = ''",
    "price_rate": "output = 0",
    "price_sheet_version": "from_ms = 0",
}


async def refused(db, statement: str) -> None:
    async with db.write() as conn:
        with pytest.raises(DBAPIError, match="append-only"):
            await conn.execute(text(statement))
        await conn.rollback()


@pytest.mark.parametrize("table", TABLES)
async def test_rows_can_neither_be_changed_nor_deleted(books, table):
    async with books.read() as conn:
        assert await conn.scalar(text(f"SELECT COUNT(*) FROM {table}"))
    await refused(books, f"UPDATE {table} SET {TABLES[table]}")
    await refused(books, f"DELETE FROM {table}")


async def test_postgresql_refuses_truncate_too(books):
    if books.dialect == "sqlite":
        return  # no such statement
    await refused(books, "TRUNCATE ledger_entry CASCADE")


async def test_the_end_of_a_price_version_is_set_once(books):
    async with books.write() as conn:
        await conn.execute(text("UPDATE price_sheet_version SET until_ms = 5000"))
    await refused(books, "UPDATE price_sheet_version SET until_ms = 6000")
    await refused(books, "UPDATE price_sheet_version SET until_ms = NULL")
