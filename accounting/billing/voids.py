"""An invoice that went to the wrong address, or under the wrong rule of tax, is made void: a credit note takes all of it
back, and an invoice with the same lines is issued at once, with the profiles of today.

The usage stays invoiced, and grants that paid stay used: the lines of the three documents add up to those of one. What
was paid or credited of the void invoice counts for the new one.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import documents, invoice_numbers, invoices
from accounting.billing.invoice_lines import Line
from accounting.billing.invoices import InvoiceInfo
from accounting.database import audit
from accounting.events import events, outbox
from accounting.ledger import ledger
from accounting.tables.invoice_models import Invoice
from accounting.tables.models import Tenant
from accounting.terms import terms as frozen
from accounting.terms.terms import Terms
from accounting.values.errors import ConflictError

COPIED = ("tenant_id", "tenant_name", "time_zone", "period", "currency", "from_ms", "until_ms")


async def void(
    conn: AsyncConnection, number: str, *, reason: str, now_ms: int, actor: str
) -> tuple[InvoiceInfo, InvoiceInfo]:
    """Returns (the credit note, the new invoice). Raises NotFoundError, and ConflictError if it is no invoice or
    void."""
    now_ms = await ledger.take_turn(conn, now_ms)
    wrong = await invoices.get(conn, number)
    if wrong.series != invoice_numbers.INVOICE:
        raise ConflictError(f"{number} is a credit note, and only invoices can be made void.")
    if wrong.standing.state == "void":
        raise ConflictError(f"{number} is void already; {wrong.standing.replaced_by} replaces it.")
    row = (await conn.execute(select(Invoice.__table__).where(Invoice.number == number))).one()
    note = await _take_back(conn, row, wrong, reason, now_ms)
    again = await _issue_again(conn, row, wrong, now_ms)
    await audit.record(
        conn,
        "headgate.invoice.voided",
        actor=actor,
        now=now_ms // 1000,
        tenant_id=wrong.tenant_id,
        object_id=number,
        detail={"reason": reason, "credit_note": note, "replaced_by": again},
    )
    made = await invoices.get(conn, again)
    told = events.invoice_closed(
        again, made.tenant_id, made.period, made.currency, (made.total, made.terms.amounts.due), now_ms
    )
    await outbox.write(conn, [told])
    return await invoices.get(conn, note), made


async def _take_back(conn: AsyncConnection, row: Any, wrong: InvoiceInfo, reason: str, now_ms: int) -> str:
    columns = {
        **{name: getattr(row, name) for name in COPIED},
        **{name: -getattr(row, name) for name in ("subtotal", "prepaid", "total", "num_requests")},
        "version": await documents.next_version(conn, row.tenant_id, row.period, invoice_numbers.CREDIT_NOTE),
        "cutoff_ms": now_ms,
        "created_at": now_ms // 1000,
        "days": [],
    }
    terms = msgspec.structs.replace(
        wrong.terms,
        discount=-wrong.terms.discount,
        amounts=wrong.terms.amounts.negated(await frozen.carried(conn, row.tenant_id, row.currency)),
        settled_before=0,
        due_at=now_ms // 1000,
        refers_to=wrong.number,
        voids=True,
        note=reason,
    )
    lines = [_negated(line) for line in wrong.lines]
    return await documents.write(conn, columns, lines, terms, invoice_numbers.CREDIT_NOTE, now_ms)


async def _issue_again(conn: AsyncConnection, row: Any, wrong: InvoiceInfo, now_ms: int) -> str:
    columns = {
        **{name: getattr(row, name) for name in COPIED},
        **{name: getattr(row, name) for name in ("subtotal", "prepaid", "total", "num_requests", "days")},
        "version": await documents.next_version(conn, row.tenant_id, row.period, invoice_numbers.INVOICE),
        # It has the same rows of the ledger.
        "cutoff_ms": row.cutoff_ms,
        "created_at": now_ms // 1000,
    }
    terms = await _terms_now(conn, wrong, now_ms)
    return await documents.write(conn, columns, wrong.lines, terms, invoice_numbers.INVOICE, now_ms)


async def _terms_now(conn: AsyncConnection, wrong: InvoiceInfo, now_ms: int) -> Terms:
    """Returns the terms of today. An erased tenant has no profile any more, so its copy in the void invoice holds."""
    discount = wrong.terms.discount
    cash = wrong.prepaid - discount
    is_erased = await conn.scalar(select(Tenant.erased_at).where(Tenant.id == wrong.tenant_id)) is not None
    like = wrong.terms if is_erased else None
    terms = await frozen.of_today(conn, wrong.tenant_id, wrong.currency, wrong.total, cash, discount, now_ms, like=like)
    settled = wrong.terms.amounts.due - wrong.standing.balance
    return msgspec.structs.replace(terms, settled_before=settled, refers_to=wrong.number)


def _negated(line: Line) -> Line:
    return msgspec.structs.replace(line, num_requests=-line.num_requests, quantity=-line.quantity, amount=-line.amount)
