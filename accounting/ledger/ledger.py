"""The order of writers to the ledger, and the rows that come from no request: corrections and transfers.

There is one poster at a time (SQLite has only one writer, PostgreSQL uses an advisory lock). Otherwise an ending and
its engine record, posted at the same moment, could each miss the other, and writers of rollup rows could deadlock.
`request_postings.py` posts the endings of requests.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import insert_all
from accounting.ledger import booking
from accounting.ledger.legs import transfer
from accounting.tables.invoice_models import DaySeal, Invoice
from accounting.tables.models import JournalOffset, LedgerEntry, LedgerLeg
from accounting.values import clock
from accounting.values.periods import DAY_S
from accounting.values.types import TOKEN_CLASSES, LedgerRow

POSTER_LOCK = 0x6C6564676572  # "ledger"
TURN_IDLE_S = 30
"""The time after which PostgreSQL ends a transaction that holds the turn and says nothing: its process stands still."""
_TAKE_TURN = select(
    func.pg_advisory_xact_lock(POSTER_LOCK),
    func.set_config("idle_in_transaction_session_timeout", f"{TURN_IDLE_S}s", True),
    # A cached plan may date from a time when the tables were empty.
    func.set_config("plan_cache_mode", "force_custom_plan", True),
)
_LAST_SEALED_DAY = select(func.max(DaySeal.day)).scalar_subquery()
_LAST_CUTOFF = select(func.max(Invoice.cutoff_ms)).scalar_subquery()
_LAST_POSTING = select(func.max(JournalOffset.posted_at_ms)).scalar_subquery()
_CLOSED = select(_LAST_SEALED_DAY, _LAST_CUTOFF, _LAST_POSTING)


async def take_turn(conn: AsyncConnection, now_ms: int | None = None) -> int:
    """Waits until the caller is the only poster; it stays so until its transaction ends. Returns the time of posting in
    milliseconds: not before the last posting, whoever's clock that was, and after every sealed day and every close. The
    turn is lost, and everything rolled back, if PostgreSQL hears nothing of the caller for half a minute."""
    if conn.dialect.name == "postgresql":
        await conn.execute(_TAKE_TURN)
    closed = await conn.execute(_CLOSED)
    day, cutoff_ms, last_ms = closed.one()
    now_ms = clock.now_ms() if now_ms is None else now_ms
    return max(0 if day is None else (day + DAY_S) * 1000, (cutoff_ms or 0) + 1, last_ms or 0, now_ms)


async def last_posting_ms(conn: AsyncConnection) -> int:
    """Returns the milliseconds at which the last ending was posted; 0 if there is none."""
    return await conn.scalar(select(_LAST_POSTING)) or 0


async def post_correction(conn: AsyncConnection, entry: LedgerRow) -> None:
    """Posts a credit note or an adjustment: a row whose charges are below 0."""
    await insert_all(conn, LedgerEntry.__table__, [entry])
    await booking.book(conn, [entry])


async def post_transfer(conn: AsyncConnection, entry: LedgerRow, debit: str, credit: str, amount: int) -> None:
    """Posts a row that moves money between two accounts and charges no tokens: a grant, its use or expiry, or kept
    KV."""
    await insert_all(conn, LedgerEntry.__table__, [entry])
    await insert_all(conn, LedgerLeg.__table__, transfer(entry, debit, credit, amount))


def blank(kind: str, event_id: str, attempt: int, tenant_id: str, currency: str, now_ms: int) -> dict[str, Any]:
    """Returns a ledger row without tokens and charges."""
    texts = ("key_id", "model", "root", "tier", "price_version", "write_off", "trace_id")
    charges = ("charge", *(f"charge_{name}" for name in TOKEN_CLASSES))
    counts = (*TOKEN_CLASSES, "speculated", "recomputed", "reserved", *charges)
    times = ("opened_at_ms", "ended_at_ms", "posted_at_ms")
    return {
        "request_id": event_id,
        "kind": kind,
        "attempt": attempt,
        "tenant_id": tenant_id,
        "currency": currency,
        "outcome": "ok",
        "batch_id": None,
        "line_no": None,
        **dict.fromkeys(texts, ""),
        **dict.fromkeys(counts, 0),
        **dict.fromkeys(times, now_ms),
    }
