"""Legs are the same whoever makes them: SQL out of its own rows, or `legs` out of the entry."""

from __future__ import annotations

from money import legs, posting, record
from sqlalchemy import select

from accounting.ledger import booking
from accounting.requests import request_postings
from accounting.tables.models import LedgerEntry, LedgerLeg
from accounting.values.types import Charge, Usage


async def test_every_entry_has_exactly_the_legs_of_the_rules(conn):
    endings = [
        posting("req_1"),
        posting("req_2", kind="void", outcome="internal", write_off="internal"),
        posting("req_3", Usage(0, 0, 1, 0)),
        posting("req_4", Usage(), charge=Charge(0, 0, 0, 0, 0)),
        posting("req_5", currency="EUR"),
    ]
    await request_postings.post(conn, 0, 10, endings)
    counted = [record("req_1", Usage(16, 32, 9, 130), speculated=7, recomputed=3), record("req_2", Usage(0, 16, 1, 4))]
    await request_postings.post_engine_records(conn, counted)
    await request_postings.reverse(conn, ["req_5"], "sdk_retry")
    entries = (await conn.execute(select(LedgerEntry.__table__))).mappings().all()
    booked = (await conn.execute(select(LedgerLeg.__table__))).mappings().all()
    kinds = {entry["kind"] for entry in entries}
    assert kinds == {"settle", "void", "internal", "speculation", "recompute", "reversal", "sdk_retry"}
    wanted = [leg for entry in entries for leg in legs(entry)]
    assert len(booked) == len(wanted) > 40
    assert {frozenset(row.items()) for row in booked} == {frozenset(leg.items()) for leg in wanted}


async def test_sqlite_looks_for_an_entry_once_and_not_once_for_each_rule(conn):
    if conn.dialect.name != "sqlite":
        return  # PostgreSQL makes the legs of a row beside it (LATERAL)
    plan = await conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {booking._BOOK_ON_SQLITE}", {"keys": "[]"})
    loops = [row[3].split()[:2] for row in plan if row[3].split()[0] in ("SCAN", "SEARCH")]
    assert [name for _, name in loops if name != "CONSTANT"] == ["wanted", "ledger_entry", "rule"]
