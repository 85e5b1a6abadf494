"""The terms of a document: a frozen copy of both profiles, the rule of tax and the amounts, in addition to its invoice row."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import func, insert, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.paging import shaped
from accounting.tables.billing_models import InvoicePayment, InvoiceTerms
from accounting.tables.invoice_models import Invoice
from accounting.terms import profiles
from accounting.terms.amounts import Amounts, of_document
from accounting.terms.parties import Customer, Issuer, TaxRule, tax_rule
from accounting.values import currencies
from accounting.values.periods import DAY_S

PREFIX_DIGITS = 6


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    issuer: Issuer
    customer: Customer
    rule: TaxRule
    decimals: int
    """Decimals of payable amounts in the document's currency."""
    discount: int
    amounts: Amounts
    settled_before: int = 0
    """The part of what is due that was paid or credited of the void invoice before it."""
    due_at: int
    refers_to: str | None = None
    voids: bool = False
    note: str = ""

    @property
    def to_pay(self) -> int:
        """The amount that the document asks for when it is issued."""
        return self.amounts.due - self.settled_before


class Standing(msgspec.Struct, frozen=True):
    """How a document stands now."""

    state: str
    """An invoice is open, paid or void. A credit note is issued."""
    balance: int
    """The amount of an invoice that is still to be paid."""
    replaced_by: str | None = None


async def of_today(
    conn: AsyncConnection,
    tenant_id: str,
    currency: str,
    total: int,
    cash: int,
    discount: int,
    now_ms: int,
    *,
    like: Terms | None = None,
) -> Terms:
    """Returns the terms of an invoice under the profiles of today. `of_document` says what `total` and `cash` are. With
    `like`, the customer and the rule of tax are those of that document."""
    issuer, decimals = await profiles.issuer(conn), currencies.decimals(currency)
    customer = await profiles.customer(conn, tenant_id) if like is None else like.customer
    rule = tax_rule(issuer, customer) if like is None else like.rule
    carried_in, unit = await carried(conn, tenant_id, currency), currencies.unit(decimals)
    days = issuer.payment_days if customer.payment_days is None else customer.payment_days
    return Terms(
        issuer=issuer,
        customer=customer,
        rule=rule,
        decimals=decimals,
        discount=discount,
        amounts=of_document(total, cash, carried_in, unit=unit, tax_rate=rule.rate),
        due_at=now_ms // 1000 + days * DAY_S,
    )


async def following(conn: AsyncConnection, prefix: str) -> tuple[str, int]:
    """Returns (number, place) of the next document of a prefix: the last place plus 1, read in the transaction that
    uses it by the holder of the poster's turn. So a transaction that is rolled back leaves no gap."""
    last = await conn.scalar(select(func.max(InvoiceTerms.place)).where(InvoiceTerms.prefix == prefix))
    place = (last or 0) + 1
    return f"{prefix}{place:0{PREFIX_DIGITS}d}", place


async def carried(conn: AsyncConnection, tenant_id: str, currency: str) -> int:
    """Returns the remainder that the tenant's documents so far have left. Each leaves what it got and what it added."""
    query = (
        select(func.sum(InvoiceTerms.carried_out - InvoiceTerms.carried_in))
        .join(Invoice, Invoice.number == InvoiceTerms.number)
        .where(Invoice.tenant_id == tenant_id, Invoice.currency == currency)
    )
    return int(await conn.scalar(query) or 0)


async def write(conn: AsyncConnection, number: str, prefix: str, place: int, terms: Terms) -> None:
    amounts = msgspec.structs.asdict(terms.amounts)
    values = {
        "number": number,
        "prefix": prefix,
        "place": place,
        "issuer": msgspec.to_builtins(terms.issuer),
        "customer": msgspec.to_builtins(terms.customer),
        "tax": terms.rule.tax,
        "tax_rate": terms.rule.rate,
        "tax_reason": terms.rule.reason,
        "tax_amount": amounts.pop("tax"),
        **amounts,
        **{name: getattr(terms, name) for name in ("decimals", "discount", "settled_before", "due_at")},
        **{name: getattr(terms, name) for name in ("refers_to", "voids", "note")},
    }
    await conn.execute(insert(InvoiceTerms).values(**values))


async def of(conn: AsyncConnection, numbers: Collection[str]) -> dict[str, Terms]:
    query = select(InvoiceTerms.__table__).where(InvoiceTerms.number.in_(numbers))
    return {row.number: _terms(row) for row in await conn.execute(query)}


async def standings(conn: AsyncConnection, known: dict[str, Terms], notes: Collection[str]) -> dict[str, Standing]:
    """Returns how each document stands. `notes` are the credit notes among them."""
    table = InvoiceTerms
    query = (
        select(table.refers_to, table.number, table.due, table.voids, Invoice.series)
        .join(Invoice, Invoice.number == table.number)
        .where(table.refers_to.in_(known))
    )
    settled = {number: terms.settled_before for number, terms in known.items()}
    void, replaced_by = set(), {}
    for row in await conn.execute(query):
        if row.series != "CN":
            replaced_by[row.refers_to] = row.number
        elif row.voids:
            void.add(row.refers_to)
        else:
            settled[row.refers_to] -= row.due
    payments = select(InvoicePayment.number, func.sum(InvoicePayment.amount)).group_by(InvoicePayment.number)
    for number, amount in await conn.execute(payments.where(InvoicePayment.number.in_(known))):
        settled[number] += int(amount)
    found = {}
    for number, terms in known.items():
        balance = 0 if number in void or number in notes else terms.amounts.due - settled[number]
        state = "issued" if number in notes else "void" if number in void else "open" if balance > 0 else "paid"
        found[number] = Standing(state, balance, replaced_by.get(number))
    return found


def _terms(row: Any) -> Terms:
    return shaped(
        Terms,
        row,
        issuer=msgspec.convert(row.issuer, Issuer),
        customer=msgspec.convert(row.customer, Customer),
        rule=TaxRule(tax=row.tax, rate=row.tax_rate, reason=row.tax_reason),
        amounts=shaped(Amounts, row, tax=row.tax_amount),
    )
