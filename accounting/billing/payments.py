"""Money that came in for an invoice. It is a separate ledger row, and the invoice itself does not change."""

from __future__ import annotations

from sqlalchemy import func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import invoices
from accounting.billing.documents import RECEIVABLE
from accounting.billing.invoices import InvoiceInfo
from accounting.database import audit
from accounting.ledger import ledger
from accounting.tables.billing_models import InvoicePayment
from accounting.values import currencies
from accounting.values.errors import ConflictError, InvalidError

CASH = "cash"


async def pay(
    conn: AsyncConnection,
    number: str,
    amount: int | None,
    *,
    reference: str,
    paid_at: int | None,
    now_ms: int,
    actor: str,
) -> InvoiceInfo:
    """Records a payment: of all that is open, if `amount` is None. A reference that the invoice has already is the same
    payment. Raises NotFoundError, InvalidError, and ConflictError if nothing, or not that much, is open."""
    now_ms = await ledger.take_turn(conn, now_ms)
    invoice = await invoices.get(conn, number)
    if reference and (known := await _amount_of(conn, number, reference)) is not None:
        if amount not in (None, known):
            raise ConflictError(f"The reference {reference} is another payment's of {number}.")
        return invoice
    if invoice.standing.state != "open":
        raise ConflictError(f"{number} is {invoice.standing.state}, so no payment of it is open.")
    amount = invoice.standing.balance if amount is None else amount
    if amount <= 0 or amount % currencies.unit(invoice.terms.decimals):
        raise InvalidError(f"A payment is a positive amount that can be paid in {invoice.currency}.", "amount")
    if amount > invoice.standing.balance:
        raise ConflictError(f"Of {number} less than that is open.")
    last = await conn.scalar(select(func.max(InvoicePayment.payment_no)).where(InvoicePayment.number == number))
    payment_no = (last or 0) + 1
    values = {
        "number": number,
        "payment_no": payment_no,
        "amount": amount,
        "paid_at": now_ms // 1000 if paid_at is None else paid_at,
        "reference": reference,
        "created_at": now_ms // 1000,
        "actor": actor,
    }
    await conn.execute(insert(InvoicePayment).values(**values))
    entry = ledger.blank("payment", number, payment_no, invoice.tenant_id, invoice.currency, now_ms)
    await ledger.post_transfer(conn, entry, CASH, RECEIVABLE, amount)
    await audit.record(
        conn,
        "headgate.invoice.paid",
        actor=actor,
        now=now_ms // 1000,
        tenant_id=invoice.tenant_id,
        object_id=number,
        detail={"micro_units": amount, "reference": reference},
    )
    return await invoices.get(conn, number)


async def _amount_of(conn: AsyncConnection, number: str, reference: str) -> int | None:
    query = select(InvoicePayment.amount).where(InvoicePayment.number == number, InvoicePayment.reference == reference)
    return await conn.scalar(query)
