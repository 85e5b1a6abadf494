"""Lines of an invoice: usage in the month sums that is on no invoice yet, adjustments, and payments by grants."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import ColumnElement, SQLColumnExpression, and_, false, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import invoice_numbers, residency_sums
from accounting.billing.grants import Grant
from accounting.billing.residency_sums import Kept
from accounting.database.paging import shaped
from accounting.prices import prices
from accounting.prices.repricing import Key, RatesByVersion, Sums, not_empty
from accounting.tables.invoice_models import Credit, Invoice, InvoiceLine, RollupMonth
from accounting.tables.models import LedgerEntry
from accounting.tables.residency_models import ResidencyCharge
from accounting.values.periods import bounds, period_of
from accounting.values.types import TOKEN_CLASSES

SumsByKey = dict[Key, Sums]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of an invoice. `kind` is usage, adjustment, credit_note or prepaid. A text that means nothing for the
    kind is empty, and such a number is 0."""

    kind: str
    period: str
    model: str = ""
    tier: str = ""
    token_class: str = ""
    price_version: str = ""
    rate: int = 0
    num_requests: int = 0
    quantity: int = 0
    amount: int = 0
    credit_id: str | None = None
    note: str = ""
    currency: str = ""
    """Currency of the invoice."""


async def is_invoiced(
    conn: AsyncConnection, tenant_id: str, opened_ms: SQLColumnExpression[int], posted_ms: SQLColumnExpression[int]
) -> ColumnElement[bool]:
    """Returns the condition that an invoice has the row: its month or a later one was closed after it was posted. A
    month may be closed after a later one, if its first usage came late."""
    query = (
        select(Invoice.until_ms, func.max(Invoice.cutoff_ms))
        .where(Invoice.tenant_id == tenant_id, Invoice.series == invoice_numbers.INVOICE)
        .group_by(Invoice.until_ms)
        .order_by(Invoice.until_ms.desc())
    )
    closes = (await conn.execute(query)).all()
    return or_(false(), *(and_(opened_ms < until_ms, posted_ms <= cutoff_ms) for until_ms, cutoff_ms in closes))


async def place_of(conn: AsyncConnection, tenant_id: str, opened_ms: int, posted_ms: int) -> tuple[str | None, str]:
    """Returns the number and the month of the invoice that has a ledger row: of those that `is_invoiced` means the first
    one that was closed. Of a void one it is the invoice that replaces it. Without such an invoice the number is None, and
    the month is the next one whose close takes the row."""
    mine = Invoice.tenant_id == tenant_id, Invoice.series == invoice_numbers.INVOICE
    having = (
        select(Invoice.number, Invoice.period)
        .where(*mine, Invoice.until_ms > opened_ms, Invoice.cutoff_ms >= posted_ms)
        .order_by(Invoice.cutoff_ms, Invoice.until_ms, Invoice.version.desc())
    )
    if (found := (await conn.execute(having.limit(1))).first()) is not None:
        return found.number, found.period
    period = period_of(opened_ms // 1000)
    closed = set(await conn.scalars(select(Invoice.period).where(*mine, Invoice.period >= period)))
    return None, period_of(bounds(max(closed))[1]) if period in closed else period


async def uninvoiced(conn: AsyncConnection, tenant_id: str, end: int) -> SumsByKey:
    """Returns the month sums up to `end`, less the lines that invoices have of them."""
    sums = await _rolled_up(conn, tenant_id, end)
    for key, had in (await invoiced(conn, tenant_id, InvoiceLine.period < period_of(end))).items():
        mine = sums.setdefault(key, Sums())
        mine.num_requests -= had.num_requests
        for i in range(len(TOKEN_CLASSES)):
            mine.tokens[i] -= had.tokens[i]
            mine.amounts[i] -= had.amounts[i]
    return not_empty(sums)


async def of_usage(conn: AsyncConnection, sums: SumsByKey) -> list[Line]:
    """Returns a line for each token class that was used. The number of requests is on the first line of each group."""
    rates = RatesByVersion()
    lines: list[Line] = []
    for key in sorted(sums):
        rest = sums[key]
        price = await rates.of(conn, key.price_version, key.model, key.tier)
        num_requests = rest.num_requests
        for i, name in enumerate(TOKEN_CLASSES):
            is_last_chance = name == TOKEN_CLASSES[-1] and num_requests
            if not (rest.tokens[i] or rest.amounts[i] or is_last_chance):
                continue
            lines.append(
                Line(
                    kind="usage",
                    period=period_of(key.bucket),
                    model=key.model,
                    tier=key.tier,
                    token_class=name,
                    price_version=key.price_version,
                    rate=0 if price is None else getattr(price, name),
                    num_requests=num_requests,
                    quantity=rest.tokens[i],
                    amount=rest.amounts[i],
                    currency=key.currency,
                )
            )
            num_requests = 0
    return lines


async def of_adjustments(conn: AsyncConnection, tenant_id: str, now_ms: int) -> list[Line]:
    """Returns the adjustments that no invoice has taken yet."""
    taken = select(InvoiceLine.credit_id).where(InvoiceLine.kind == "adjustment")
    query = (
        select(Credit.__table__, LedgerEntry.model, LedgerEntry.tier, LedgerEntry.price_version)
        .add_columns(LedgerEntry.opened_at_ms)
        .join(LedgerEntry, LedgerEntry.request_id == Credit.corrects_request_id)
        .where(Credit.tenant_id == tenant_id, Credit.type == "adjustment", Credit.id.not_in(taken))
        .where(LedgerEntry.kind == "settle", Credit.created_at * 1000 <= now_ms)
        .order_by(Credit.created_at, Credit.id)
    )
    return [
        Line(
            kind="adjustment",
            period=period_of(row.opened_at_ms // 1000),
            model=row.model,
            tier=row.tier,
            price_version=row.price_version,
            amount=-row.amount,
            credit_id=row.id,
            currency=row.currency,
            note=f"{row.corrects_request_id} {row.note}".strip(),
        )
        for row in await conn.execute(query)
    ]


async def of_residency(conn: AsyncConnection, tenant_id: str, end: int) -> list[Line]:
    """Returns the charges for kept KV of hours before `end`, less the lines that earlier invoices have of it."""
    sums = await residency_sums.charged(conn, tenant_id, ResidencyCharge.hour < end)
    had = await residency_sums.invoiced(conn, tenant_id)
    lines = []
    for key in sorted(sums):
        rest = sums[key] - had.get(key, Kept())
        if rest != Kept():
            rates = await prices.residency_rates(conn, key.price_version, key.model) or (0, 0)
            rate = rates[residency_sums.CLASSES.index(key.token_class)]
            lines.append(
                Line(
                    kind="usage",
                    period=key.period,
                    model=key.model,
                    token_class=key.token_class,
                    price_version=key.price_version,
                    rate=rate,
                    quantity=rest.byte_hours,
                    amount=rest.amount,
                    currency=key.currency,
                )
            )
    return lines


def of_grant(grant: Grant, amount: int, period: str, currency: str) -> Line:
    return Line(kind="prepaid", period=period, amount=-amount, credit_id=grant.id, currency=currency, note=grant.note)


async def left(conn: AsyncConnection, tenant_id: str, now: int) -> list[Line]:
    """Returns the lines of all that the tenant has and no invoice has, up to the end of the present month."""
    _, end = bounds(period_of(now))
    lines = await of_usage(conn, await uninvoiced(conn, tenant_id, end))
    lines += await of_residency(conn, tenant_id, end)
    return lines + await of_adjustments(conn, tenant_id, now * 1000)


async def of_invoice(conn: AsyncConnection, number: str) -> list[Line]:
    query = (
        select(InvoiceLine.__table__, Invoice.currency)
        .join(Invoice, Invoice.number == InvoiceLine.number)
        .where(InvoiceLine.number == number)
        .order_by(InvoiceLine.line_no)
    )
    return [shaped(Line, row) for row in await conn.execute(query)]


def rows(number: str, lines: list[Line]) -> list[dict[str, Any]]:
    made = []
    for line_no, line in enumerate(lines, 1):
        fields = msgspec.structs.asdict(line)
        del fields["currency"]
        made.append({"number": number, "line_no": line_no, **fields})
    return made


async def _rolled_up(conn: AsyncConnection, tenant_id: str, end: int) -> SumsByKey:
    columns = [getattr(RollupMonth, name) for name in ("bucket", *Key._fields[1:])]
    names = ("num_requests", *TOKEN_CLASSES, *(f"charge_{name}" for name in TOKEN_CLASSES))
    query = (
        select(*columns, *(func.sum(getattr(RollupMonth, name)).label(name) for name in names))
        .where(RollupMonth.tenant_id == tenant_id, RollupMonth.bucket < end)
        .group_by(*columns)
    )
    sums: SumsByKey = {}
    for row in await conn.execute(query):
        found = sums[Key(*row[: len(columns)])] = Sums(int(row.num_requests))
        found.tokens = [int(getattr(row, name)) for name in TOKEN_CLASSES]
        found.amounts = [int(getattr(row, f"charge_{name}")) for name in TOKEN_CLASSES]
    return sums


async def invoiced(conn: AsyncConnection, tenant_id: str, *where: ColumnElement[bool]) -> SumsByKey:
    """Returns the sums of a tenant's usage over all its documents. A credit note that cancels an invoice takes away."""
    group = (InvoiceLine.period, InvoiceLine.model, InvoiceLine.tier, InvoiceLine.price_version, Invoice.currency)
    sums = (InvoiceLine.num_requests, InvoiceLine.quantity, InvoiceLine.amount)
    query = (
        select(*group, InvoiceLine.token_class, *(func.sum(column) for column in sums))
        .join(Invoice, Invoice.number == InvoiceLine.number)
        .where(Invoice.tenant_id == tenant_id, *where)
        .where(InvoiceLine.kind == "usage", InvoiceLine.token_class.in_(TOKEN_CLASSES))
        .group_by(*group, InvoiceLine.token_class)
    )
    found: SumsByKey = {}
    for row in await conn.execute(query):
        period, *names, token_class, num_requests, quantity, amount = row
        key = Key(bounds(period)[0], *names)
        mine = found.setdefault(key, Sums())
        i = TOKEN_CLASSES.index(token_class)
        mine.num_requests += int(num_requests)
        mine.tokens[i], mine.amounts[i] = int(quantity), int(amount)
    return found
