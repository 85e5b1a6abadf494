"""A document is written: its row, its lines, its terms and the tax that the customer owes by it."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import invoice_lines, invoice_numbers
from accounting.billing.invoice_lines import Line
from accounting.ledger import ledger
from accounting.tables.invoice_models import Invoice, InvoiceLine
from accounting.terms import terms as frozen
from accounting.terms.terms import Terms

RECEIVABLE, TAX_PAYABLE = "tenant_receivable", "tax_payable"


async def write(
    conn: AsyncConnection,
    columns: dict[str, Any],
    lines: list[Line],
    terms: Terms,
    series: invoice_numbers.Series,
    now_ms: int,
) -> str:
    """Writes a document and returns its number. `columns` are those of the invoice row that `terms` do not know. The
    caller holds `ledger.take_turn`."""
    number, place = await frozen.following(conn, _prefix(terms, series))
    await conn.execute(
        insert(Invoice).values(
            number=number,
            series=series,
            sequence=await invoice_numbers.following(conn, series),
            issuer=terms.issuer.name,
            **columns,
        )
    )
    await conn.execute(insert(InvoiceLine), invoice_lines.rows(number, lines))
    await frozen.write(conn, number, _prefix(terms, series), place, terms)
    await _post_tax(conn, number, columns, terms.amounts.tax, now_ms)
    return number


def _prefix(terms: Terms, series: invoice_numbers.Series) -> str:
    name = "invoice_prefix" if series == invoice_numbers.INVOICE else "credit_note_prefix"
    return str(getattr(terms.customer, name) or getattr(terms.issuer, name))


async def _post_tax(conn: AsyncConnection, number: str, columns: dict[str, Any], tax: int, now_ms: int) -> None:
    """The customer owes the tax, and we owe it to the state; a credit note takes both back."""
    if not tax:
        return
    entry = ledger.blank("tax", number, 0, columns["tenant_id"], columns["currency"], now_ms)
    sides = (RECEIVABLE, TAX_PAYABLE) if tax > 0 else (TAX_PAYABLE, RECEIVABLE)
    await ledger.post_transfer(conn, entry, *sides, abs(tax))


async def next_version(conn: AsyncConnection, tenant_id: str, period: str, series: invoice_numbers.Series) -> int:
    """Returns 1 plus the number of the tenant's documents of that kind and period."""
    query = select(func.count()).where(
        Invoice.tenant_id == tenant_id, Invoice.period == period, Invoice.series == series
    )
    return (await conn.scalar(query) or 0) + 1
