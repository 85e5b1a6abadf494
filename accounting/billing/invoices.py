"""The close of a tenant's month: it happens once, cannot be undone, and is reconciled with every ledger row.

The lines are the usage in the month sums that no earlier invoice has. Usage that was posted after a month's close comes
as a late line on the next invoice, and the total over all invoices is the ledger's. Before anything is written every
row is priced once more from its usage; a single micro-unit of difference refuses the close.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, FromClause, Select, exists, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import credits, documents, drafts, invoice_lines, invoice_numbers
from accounting.billing.invoice_lines import Line
from accounting.database import auth_epoch
from accounting.database.db import Database, among
from accounting.database.paging import Page, newest_first, shaped
from accounting.events import events, outbox
from accounting.ledger import ledger, rollups
from accounting.prices.repricing import ENTRIES, Repriced, not_empty, posted_since
from accounting.tables.invoice_models import Invoice, InvoiceLine, RollupMonth
from accounting.tables.models import LedgerEntry
from accounting.tables.residency_models import ResidencyCharge
from accounting.terms import terms
from accounting.terms.terms import Standing, Terms
from accounting.values.errors import ConflictError, NotFoundError
from accounting.values.periods import bounds, period_of
from accounting.values.types import OPERATOR_TENANT, TOKEN_CLASSES

DRAFT = "DRAFT"
"""The number of an invoice that is not made yet."""
LATENESS_S = 48 * 3_600
"""A period closes this long after its end. A row that is posted later is on the next invoice."""

_IS_USED = or_(*(getattr(RollupMonth, name) != 0 for name in rollups.COUNTED))
"""The condition that a month's sums have anything: sums are 0 where all of their requests were reversed."""


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
    terms: Terms
    standing: Standing
    lines: list[Line] = []


def refuse_early(period: str, now_ms: int) -> None:
    """Raises ConflictError while the period cannot be closed yet."""
    _, end = bounds(period)
    if now_ms < (end + LATENESS_S) * 1000:
        raise ConflictError(f"The period {period} closes 48 hours after its end.")


async def close(database: Database, tenant_id: str, period: str, *, now_ms: int, actor: str) -> InvoiceInfo:
    """Returns the invoice of that period: a new one, or the one that was made before. Raises ConflictError if it is too
    early, if an earlier month is open, if there is nothing to invoice, or if rows and sums differ."""
    _, end = bounds(period)
    refuse_early(period, now_ms)
    async with database.read() as conn:
        # This is the long part, and it runs while others write. Rows that are posted from `mark_ms` on are read under
        # the lock.
        known = await _known(conn, tenant_id, period)
        if known is not None:
            return known
        mark_ms = await ledger.last_posting_ms(conn)
        rows = Repriced()
        open_rows = await _open_rows(conn, tenant_id, end, ENTRIES)
        await rows.add(conn, *open_rows, LedgerEntry.posted_at_ms < mark_ms)
    async with database.write() as conn:
        now_ms = await ledger.take_turn(conn, now_ms)
        known = await _known(conn, tenant_id, period)
        if known is not None:
            return known
        posted = posted_since(mark_ms)
        await rows.add(conn, *await _open_rows(conn, tenant_id, end, posted), among=posted)
        number = await _issue(conn, tenant_id, period, rows, now_ms=now_ms)
        await auth_epoch.record(
            conn,
            "headgate.invoice.closed",
            actor=actor,
            now=now_ms // 1000,
            tenant_id=tenant_id,
            object_id=number,
            detail={"period": period},
        )
        made = await get(conn, number)
        told = events.invoice_closed(
            number, tenant_id, period, made.currency, (made.total, made.terms.amounts.due), now_ms
        )
        await outbox.write(conn, [told])
        return made


async def preview(conn: AsyncConnection, tenant_id: str, period: str, *, now_ms: int) -> InvoiceInfo:
    """Returns the invoice that a close would make of what is posted so far. Nothing is written and nothing is
    reconciled. Raises ConflictError if the period is closed or has not begun, if an earlier one is open, or if there is
    nothing to invoice."""
    start, end = bounds(period)
    if now_ms < start * 1000:
        raise ConflictError(f"The period {period} has not begun: there is nothing to preview yet.")
    known = await _known(conn, tenant_id, period)
    if known is not None:
        raise ConflictError(f"The period {period} is closed: its invoice is {known.number}.")
    earlier = await _open_before(conn, tenant_id, start)
    if earlier is not None:
        raise ConflictError(
            f"The period {earlier} is still open, and its usage is on no invoice: preview {earlier}, or close it before"
            f" you preview {period}."
        )
    sums = await invoice_lines.uninvoiced(conn, tenant_id, end)
    draft = await drafts.of_period(conn, tenant_id, period, sums, now_ms)
    return InvoiceInfo(
        **_columns(draft),
        number=DRAFT,
        series=invoice_numbers.INVOICE,
        issuer=draft.terms.issuer.name,
        version=1,
        created_at=now_ms // 1000,
        terms=draft.terms,
        standing=Standing("draft", draft.terms.amounts.due),
        lines=draft.lines,
    )


async def get(conn: AsyncConnection, number: str, tenant_id: str | None = None) -> InvoiceInfo:
    """Returns the invoice with its lines. With `tenant_id` another tenant's invoice is unknown. Raises
    NotFoundError."""
    row = (await conn.execute(select(Invoice.__table__).where(Invoice.number == number))).first()
    if row is None or tenant_id not in (None, row.tenant_id):
        raise NotFoundError("There is no such invoice.")
    (info,) = await _infos(conn, [row])
    return msgspec.structs.replace(info, lines=await invoice_lines.of_invoice(conn, number))


async def list_invoices(
    conn: AsyncConnection,
    *,
    tenant_id: str | None = None,
    period: str | None = None,
    after: str | None = None,
    limit: int,
) -> Page[InvoiceInfo]:
    """Returns invoices, newest first, without their lines."""
    query = select(Invoice.__table__)
    if tenant_id is not None:
        query = query.where(Invoice.tenant_id == tenant_id)
    if period is not None:
        query = query.where(Invoice.period == period)
    page = await newest_first(conn, query, Invoice, after, limit)
    return Page(await _infos(conn, page.items), page.has_more)


async def due_tenants(conn: AsyncConnection, period: str) -> list[str]:
    """Returns the tenants that have no invoice for that month and used anything in it, or were charged late for a month
    that is closed. What was reversed was not used, and KV that was kept for somebody without requests may be on the
    next month's invoice. The operator, who fills public prefixes, sends itself none."""
    return sorted(await _that_used(conn, period) | await _charged_late(conn, period))


async def due(conn: AsyncConnection, end: int) -> list[tuple[str, str]]:
    """Returns each month before `end`, Unix seconds, and tenant that is due for an invoice, the oldest month first. KV
    that was kept for somebody without requests counts in the last of these months, as do late charges of closed ones;
    before it they wait for the next invoice."""
    has_invoice = exists().where(
        Invoice.tenant_id == RollupMonth.tenant_id,
        Invoice.from_ms == RollupMonth.bucket * 1000,
        Invoice.series == invoice_numbers.INVOICE,
    )
    query = select(RollupMonth.bucket, RollupMonth.tenant_id).where(
        RollupMonth.bucket < end, _IS_USED, ~has_invoice, RollupMonth.tenant_id != OPERATOR_TENANT
    )
    found = {(period_of(row.bucket), row.tenant_id) for row in await conn.execute(query.distinct())}
    last = period_of(end - 1)
    # The invoice of a month that is open takes what came late, and leaves nothing of it for the last month.
    late = await _charged_late(conn, last) - {tenant_id for _, tenant_id in found}
    return sorted(found | {(last, tenant_id) for tenant_id in await _that_used(conn, last) | late})


async def _that_used(conn: AsyncConnection, period: str) -> set[str]:
    start, end = bounds(period)
    used = select(RollupMonth.tenant_id).where(RollupMonth.bucket == start, _IS_USED)
    kept = select(ResidencyCharge.tenant_id).where(ResidencyCharge.hour >= start, ResidencyCharge.hour < end)
    without = {OPERATOR_TENANT, *await conn.scalars(_invoiced_for(period))}
    due = {*await conn.scalars(used.distinct())} - without
    for tenant_id in {*await conn.scalars(kept.distinct())} - due - without:
        if await invoice_lines.of_residency(conn, tenant_id, end):
            due.add(tenant_id)
    return due


async def _charged_late(conn: AsyncConnection, period: str) -> set[str]:
    """Returns the tenants without an invoice for that month whose closed months before it were charged more than
    invoices have of them."""
    start, _ = bounds(period)
    closed = select(Invoice.tenant_id, Invoice.from_ms).where(
        Invoice.series == invoice_numbers.INVOICE,
        Invoice.from_ms < start * 1000,
        Invoice.tenant_id.not_in(_invoiced_for(period)),
    )
    month = closed.distinct().subquery()
    charged = (
        select(RollupMonth.tenant_id, func.sum(RollupMonth.charge))
        .join(month, (RollupMonth.tenant_id == month.c.tenant_id) & (RollupMonth.bucket == month.c.from_ms // 1000))
        .group_by(RollupMonth.tenant_id)
    )
    charges = {tenant_id: int(charge) for tenant_id, charge in await conn.execute(charged)}
    had = (
        select(Invoice.tenant_id, func.sum(InvoiceLine.amount))
        .join(InvoiceLine, InvoiceLine.number == Invoice.number)
        .where(among(conn, Invoice.tenant_id, charges), InvoiceLine.period < period)
        .where(InvoiceLine.kind == "usage", InvoiceLine.token_class.in_(TOKEN_CLASSES))
        .group_by(Invoice.tenant_id)
    )
    for tenant_id, amount in await conn.execute(had):
        charges[tenant_id] -= int(amount)
    return {tenant_id for tenant_id, rest in charges.items() if rest > 0}


def _invoiced_for(period: str) -> Select[str]:
    return select(Invoice.tenant_id).where(Invoice.period == period, Invoice.series == invoice_numbers.INVOICE)


async def _known(conn: AsyncConnection, tenant_id: str, period: str) -> InvoiceInfo | None:
    number = await conn.scalar(
        select(Invoice.number)
        .where(Invoice.tenant_id == tenant_id, Invoice.period == period, Invoice.series == invoice_numbers.INVOICE)
        .order_by(Invoice.version.desc())
        .limit(1)
    )
    return None if number is None else await get(conn, number)


async def _open_rows(conn: AsyncConnection, tenant_id: str, end: int, among: FromClause) -> list[ColumnElement[bool]]:
    """Returns the conditions for rows up to `end` that no invoice has. Rows of a month without an invoice are among
    them, and rows of closed months that were posted after the close."""
    opened = among.c.opened_at_ms
    known = await invoice_lines.is_invoiced(conn, tenant_id, opened, among.c.posted_at_ms)
    return [among.c.tenant_id == tenant_id, opened < end * 1000, ~known]


async def _issue(conn: AsyncConnection, tenant_id: str, period: str, rows: Repriced, *, now_ms: int) -> str:
    """Writes a new invoice with its lines, its terms and its payments by grants. Returns its number."""
    start, end = bounds(period)
    earlier = await _open_before(conn, tenant_id, start)
    if earlier is not None:
        raise ConflictError(f"The period {earlier} must be closed first.")
    sums = await invoice_lines.uninvoiced(conn, tenant_id, end)
    _check_rows(rows, sums, period)
    draft = await drafts.of_period(conn, tenant_id, period, sums, now_ms)
    number = await documents.write(
        conn,
        {**_columns(draft), "version": 1, "cutoff_ms": now_ms, "created_at": now_ms // 1000},
        draft.lines,
        draft.terms,
        invoice_numbers.INVOICE,
        now_ms,
    )
    for uses, ended in ((draft.paid, False), (draft.expired, True)):
        for grant, amount in uses:
            await credits.use(
                conn,
                grant,
                amount,
                expired=ended,
                tenant_id=tenant_id,
                currency=draft.currency,
                number=number,
                now_ms=now_ms,
            )
    return number


def _columns(draft: drafts.Draft) -> dict[str, Any]:
    start, end = bounds(draft.period)
    names = ("tenant_id", "tenant_name", "time_zone", "period", "currency", "subtotal", "prepaid", "days")
    return {
        **{name: getattr(draft, name) for name in names},
        "from_ms": start * 1000,
        "until_ms": end * 1000,
        "num_requests": sum(line.num_requests for line in draft.lines),
        "total": draft.subtotal - draft.prepaid,
    }


async def _open_before(conn: AsyncConnection, tenant_id: str, start: int) -> str | None:
    """Returns the first period before `start` that must be closed before a later one. Months are closed in order: a late
    line then always belongs to a month that was closed. A month without usage, or whose requests were all reversed, has
    no invoice and stops no other."""
    used = select(RollupMonth.bucket).where(RollupMonth.tenant_id == tenant_id, RollupMonth.bucket < start, _IS_USED)
    closed = select(Invoice.period).where(Invoice.tenant_id == tenant_id, Invoice.series == invoice_numbers.INVOICE)
    closed_periods = set((await conn.execute(closed)).scalars())
    for bucket in (await conn.execute(used.distinct().order_by(RollupMonth.bucket))).scalars():
        if (period := period_of(bucket)) not in closed_periods:
            return period
    return None


def _check_rows(rows: Repriced, sums: invoice_lines.SumsByKey, period: str) -> None:
    if rows.wrong:
        raise ConflictError(f"Charges differ from usage times price: {', '.join(rows.wrong)}.")
    priced = not_empty(rows.sums)
    if priced != sums:
        differing = [key for key in {**priced, **sums} if priced.get(key) != sums.get(key)]
        named = "; ".join(" ".join(map(str, key)) for key in sorted(differing)[:5])
        raise ConflictError(f"The sums of {period} are not the sums of its rows: {named}.")


async def _infos(conn: AsyncConnection, rows: Sequence[Any]) -> list[InvoiceInfo]:
    known = await terms.of(conn, [row.number for row in rows])
    notes = [row.number for row in rows if row.series == invoice_numbers.CREDIT_NOTE]
    standings = await terms.standings(conn, known, notes)
    return [shaped(InvoiceInfo, row, terms=known[row.number], standing=standings[row.number], lines=[]) for row in rows]
