"""The close of a tenant's month: it happens once, cannot be undone, and is reconciled with every ledger row.

The lines are the usage in the month sums that no earlier invoice has. Usage that was posted after a month's close comes
as a late line on the next invoice, and the total over all invoices is the ledger's. Before anything is written every
row is priced once more from its usage; a single micro-unit of difference refuses the close.
"""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import func, insert, or_, select, union
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import credits, grants, invoice_lines, residency_sums
from accounting.billing import invoice_numbers as numbers
from accounting.billing.invoice_lines import Line
from accounting.database import auth_epoch as changes
from accounting.database.db import Database
from accounting.database.paging import Page, newest_first
from accounting.events import events, outbox
from accounting.ledger import ledger
from accounting.prices.repricing import Repriced
from accounting.tables.invoice_models import Invoice, InvoiceLine, RollupMonth
from accounting.tables.models import LedgerEntry, RollupDay, RollupHour, Tenant
from accounting.tables.residency_models import ResidencyCharge
from accounting.values.errors import ConflictError, NotFoundError
from accounting.values.periods import DAY_S, bounds, period_of

LATENESS_S = 48 * 3_600
"""A period closes this long after its end. A row that is posted later is on the next invoice."""


class InvoiceInfo(msgspec.Struct, frozen=True, kw_only=True):
    number: str
    series: str
    issuer: str
    tenant_id: str
    tenant_name: str
    time_zone: str
    period: str
    version: int
    currency: str
    from_ms: int
    until_ms: int
    created_at: int
    num_requests: int
    subtotal: int
    prepaid: int
    total: int
    days: list[int]
    lines: list[Line] = []


def refuse_early(period: str, now_ms: int) -> None:
    """Raises ConflictError while the period cannot be closed yet."""
    _, end = bounds(period)
    if now_ms < (end + LATENESS_S) * 1000:
        raise ConflictError(f"The period {period} closes 48 hours after its end.")


async def close(
    database: Database, tenant_id: str, period: str, *, issuer: str, now_ms: int, actor: str
) -> InvoiceInfo:
    """Return the invoice of that period: a new one, or the one that was made before. Raises ConflictError if it is too
    early, if an earlier month is open, if there is nothing to invoice, or if rows and sums differ."""
    start, end = bounds(period)
    refuse_early(period, now_ms)
    async with database.read() as conn:
        # This is the long part, and it runs while others write. Rows that are posted from `mark_ms` on are read under
        # the lock.
        known = await _known(conn, tenant_id, period)
        if known is not None:
            return known
        mark_ms = await ledger.last_posting_ms(conn)
        rows = Repriced()
        open_rows = await _open_rows(conn, tenant_id, start, end)
        await rows.add(conn, *open_rows, LedgerEntry.posted_at_ms < mark_ms)
    async with database.write() as conn:
        now_ms = await ledger.take_turn(conn, now_ms)
        known = await _known(conn, tenant_id, period)
        if known is not None:
            return known
        await rows.add(conn, *open_rows, LedgerEntry.posted_at_ms >= mark_ms)
        number = await _issue(conn, tenant_id, period, rows, issuer=issuer, now_ms=now_ms)
        await changes.record(
            conn,
            "headgate.invoice.closed",
            actor=actor,
            now=now_ms // 1000,
            tenant_id=tenant_id,
            object_id=number,
            detail={"period": period},
        )
        made = await get(conn, number)
        told = events.invoice_closed(number, tenant_id, period, made.currency, made.total, now_ms)
        await outbox.write(conn, [told])
        return made


async def get(conn: AsyncConnection, number: str, tenant_id: str | None = None) -> InvoiceInfo:
    """Return the invoice with its lines. With `tenant_id` another tenant's invoice is unknown. Raises NotFoundError."""
    row = (await conn.execute(select(Invoice.__table__).where(Invoice.number == number))).first()
    if row is None or tenant_id not in (None, row.tenant_id):
        raise NotFoundError("No such invoice.")
    return _info(row, await invoice_lines.of_invoice(conn, number))


async def list_invoices(
    conn: AsyncConnection,
    *,
    tenant_id: str | None = None,
    period: str | None = None,
    after: str | None = None,
    limit: int,
) -> Page[InvoiceInfo]:
    """Return invoices, newest first, without their lines."""
    query = select(Invoice.__table__)
    if tenant_id is not None:
        query = query.where(Invoice.tenant_id == tenant_id)
    if period is not None:
        query = query.where(Invoice.period == period)
    page = await newest_first(conn, query, Invoice.created_at, Invoice.number, after, limit)
    return Page([_info(row, []) for row in page.items], page.has_more)


async def due_tenants(conn: AsyncConnection, period: str) -> list[str]:
    """Return the tenants that used anything in that month and have no invoice for it."""
    start, end = bounds(period)
    invoiced = select(Invoice.tenant_id).where(Invoice.period == period, Invoice.series == numbers.INVOICE)
    used = select(RollupMonth.tenant_id).where(RollupMonth.bucket == start)
    kept = select(ResidencyCharge.tenant_id).where(ResidencyCharge.hour >= start, ResidencyCharge.hour < end)
    either = union(used, kept).subquery()
    query = select(either.c.tenant_id).where(either.c.tenant_id.not_in(invoiced))
    return sorted((await conn.execute(query)).scalars())


async def _known(conn: AsyncConnection, tenant_id: str, period: str) -> InvoiceInfo | None:
    number = await conn.scalar(
        select(Invoice.number).where(
            Invoice.tenant_id == tenant_id,
            Invoice.period == period,
            Invoice.series == numbers.INVOICE,
            Invoice.version == 1,
        )
    )
    return None if number is None else await get(conn, number)


async def _open_rows(conn: AsyncConnection, tenant_id: str, start: int, end: int) -> list[Any]:
    """Return the conditions for rows that no invoice has: rows of the period, and earlier rows posted after the last
    close."""
    last_cutoff = await conn.scalar(
        select(func.max(Invoice.cutoff_ms)).where(Invoice.tenant_id == tenant_id, Invoice.series == numbers.INVOICE)
    )
    new = LedgerEntry.opened_at_ms >= start * 1000
    if last_cutoff is not None:
        new = or_(new, LedgerEntry.posted_at_ms > last_cutoff)
    return [LedgerEntry.tenant_id == tenant_id, LedgerEntry.opened_at_ms < end * 1000, new]


async def _issue(
    conn: AsyncConnection, tenant_id: str, period: str, rows: Repriced, *, issuer: str, now_ms: int
) -> str:
    """Write a new invoice with its lines and its payments by grants. Returns its number."""
    start, end = bounds(period)
    tenant = (await conn.execute(select(Tenant.name, Tenant.time_zone).where(Tenant.id == tenant_id))).first()
    if tenant is None:
        raise NotFoundError("No such tenant.")
    await _check_earlier_months(conn, tenant_id, start)
    sums = await invoice_lines.uninvoiced(conn, tenant_id, end)
    _check_rows(rows, sums, period)
    lines = await invoice_lines.of_usage(conn, sums)
    lines += await invoice_lines.of_residency(conn, tenant_id, end)
    lines += await invoice_lines.of_adjustments(conn, tenant_id, now_ms)
    if not lines:
        raise ConflictError(f"There is nothing to invoice for {period}.")
    currencies = {key.currency for key in sums} | {line.currency for line in lines}
    if len(currencies) != 1:
        raise ConflictError("The tenant was charged in more than one currency.")
    currency = currencies.pop()
    subtotal = sum(line.amount for line in lines)
    late = sum(line.amount for line in lines if line.kind == "usage" and line.period != period)
    paid, expired = await _prepaid(conn, tenant_id, currency, period, late, subtotal)
    prepaid = sum(amount for _, amount in paid)
    lines += [invoice_lines.of_grant(grant, amount, period, currency) for grant, amount in paid]
    number, sequence = await numbers.following(conn, numbers.INVOICE)
    await conn.execute(
        insert(Invoice).values(
            number=number,
            series=numbers.INVOICE,
            sequence=sequence,
            issuer=issuer,
            tenant_id=tenant_id,
            tenant_name=tenant.name,
            time_zone=tenant.time_zone,
            period=period,
            version=1,
            currency=currency,
            from_ms=start * 1000,
            until_ms=end * 1000,
            cutoff_ms=now_ms,
            created_at=now_ms // 1000,
            num_requests=sum(line.num_requests for line in lines),
            subtotal=subtotal,
            prepaid=prepaid,
            total=subtotal - prepaid,
            days=await _days(conn, tenant_id, start, end),
        )
    )
    await conn.execute(insert(InvoiceLine), invoice_lines.rows(number, lines))
    for uses, ended in ((paid, False), (expired, True)):
        for grant, amount in uses:
            await credits.use(
                conn, grant, amount, expired=ended, tenant_id=tenant_id, currency=currency, number=number, now_ms=now_ms
            )
    return number


async def _check_earlier_months(conn: AsyncConnection, tenant_id: str, start: int) -> None:
    """Months are closed in order. A late line then always belongs to a month that was closed. Raises ConflictError."""
    used = select(RollupMonth.bucket).where(RollupMonth.tenant_id == tenant_id, RollupMonth.bucket < start)
    closed = select(Invoice.period).where(Invoice.tenant_id == tenant_id, Invoice.series == numbers.INVOICE)
    closed_periods = set((await conn.execute(closed)).scalars())
    for bucket in (await conn.execute(used.distinct().order_by(RollupMonth.bucket))).scalars():
        if period_of(bucket) not in closed_periods:
            raise ConflictError(f"The period {period_of(bucket)} must be closed first.")


def _check_rows(rows: Repriced, sums: invoice_lines.SumsByKey, period: str) -> None:
    if rows.wrong:
        raise ConflictError(f"Charges differ from usage times price: {', '.join(rows.wrong)}.")
    if rows.sums != sums:
        differing = [key for key in {**rows.sums, **sums} if rows.sums.get(key) != sums.get(key)]
        named = "; ".join(" ".join(map(str, key)) for key in sorted(differing)[:5])
        raise ConflictError(f"The sums of {period} are not the sums of its rows: {named}.")


async def _prepaid(
    conn: AsyncConnection, tenant_id: str, currency: str, period: str, late: int, subtotal: int
) -> tuple[list[tuple[grants.Grant, int]], list[tuple[grants.Grant, int]]]:
    """Return the amount that each grant pays, and the rest of each grant that has ended with the period."""
    start, end = bounds(period)
    hours = {
        row.bucket: int(row.charge)
        for row in await conn.execute(
            select(RollupHour.bucket, func.sum(RollupHour.charge).label("charge"))
            .where(RollupHour.tenant_id == tenant_id)
            .where(RollupHour.bucket >= start, RollupHour.bucket < end)
            .group_by(RollupHour.bucket)
        )
    }
    for hour, charge in (await residency_sums.by_hour(conn, tenant_id, start, end)).items():
        hours[hour] = hours.get(hour, 0) + charge
    # Usage that was posted late counts from the beginning of the period in which it is invoiced.
    hours[start] = hours.get(start, 0) + max(0, late)
    known = await credits.open_grants(conn, tenant_id, currency)
    paid = grants.allocate(hours, known, max(0, subtotal))
    taken = {grant.id: amount for grant, amount in paid}
    expired = [
        (grant, grant.remaining - taken.get(grant.id, 0))
        for grant in known
        if grant.expires_at is not None and grant.expires_at <= end
    ]
    return paid, [(grant, amount) for grant, amount in expired if amount]


async def _days(conn: AsyncConnection, tenant_id: str, start: int, end: int) -> list[int]:
    query = (
        select(RollupDay.bucket, func.sum(RollupDay.charge).label("charge"))
        .where(RollupDay.tenant_id == tenant_id, RollupDay.bucket >= start, RollupDay.bucket < end)
        .group_by(RollupDay.bucket)
    )
    charges = {row.bucket: int(row.charge) for row in await conn.execute(query)}
    for hour, charge in (await residency_sums.by_hour(conn, tenant_id, start, end)).items():
        day = hour - hour % DAY_S
        charges[day] = charges.get(day, 0) + charge
    return [charges.get(day, 0) for day in range(start, end, DAY_S)]


def _info(row: Any, lines: list[Line]) -> InvoiceInfo:
    names = [name for name in InvoiceInfo.__struct_fields__ if name != "lines"]
    return InvoiceInfo(**{name: row._mapping[name] for name in names}, lines=lines)
