"""Equations over invoices and sealed days: I9 (invoice truth) and I18 (immutability). The module writes nothing."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Select, and_, case, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import invoice_lines, invoice_numbers, residency_sums
from accounting.books import day_hashes, equations
from accounting.books.equations import EquationResult
from accounting.prices.repricing import Repriced, not_empty
from accounting.tables.billing_models import InvoiceTerms
from accounting.tables.invoice_models import Credit, CreditUse, Invoice, InvoiceLine
from accounting.tables.models import LedgerEntry
from accounting.tables.residency_models import ResidencyCharge
from accounting.values.types import BILLED, CORRECTIONS


async def invoice_truth(conn: AsyncConnection) -> EquationResult:
    """Invoices add up and their numbers have no gap. A tenant's invoices together hold exactly the usage of its rows up
    to its closes, with each row priced once more."""
    failures = await _found(conn, _wrong_totals() + _wrong_corrections())
    failures += [f"series {series}: a number is missing" for series in await _found(conn, _gaps())]
    num_checked, entry, table = 0, LedgerEntry, ResidencyCharge
    tenant_ids = select(Invoice.tenant_id).where(Invoice.series == invoice_numbers.INVOICE).distinct()
    for tenant_id in (await conn.execute(tenant_ids)).scalars().all():
        rows = Repriced()
        closed = await invoice_lines.is_invoiced(conn, tenant_id, entry.opened_at_ms, entry.posted_at_ms)
        await rows.add(conn, entry.tenant_id == tenant_id, closed)
        failures += rows.wrong
        if not_empty(rows.sums) != not_empty(await invoice_lines.invoiced(conn, tenant_id)):
            failures.append(f"invoices of {tenant_id}: not the sums of their rows")
        num_checked += rows.num_rows
        closed = await invoice_lines.is_invoiced(conn, tenant_id, table.hour * 1000, table.posted_at_ms)
        kept = await residency_sums.charged(conn, tenant_id, closed)
        if kept != await residency_sums.invoiced(conn, tenant_id):
            failures.append(f"invoices of {tenant_id}: not what was charged for kept KV")
    num_charges, wrong = await residency_sums.wrong(conn)
    return EquationResult(equations.INVOICE_TRUTH, num_checked + num_charges, (*failures, *wrong))


async def immutability(conn: AsyncConnection) -> EquationResult:
    """Sealed days hold the rows that were sealed. Every correction is a separate row and takes back no more than
    settle and reversal leave."""
    num_days, failures = await day_hashes.broken(conn)
    for wrong in _wrong_credits():
        failures += sorted(str(name) for name in (await conn.execute(wrong)).scalars())
    num_credits = await conn.scalar(_NUM_CREDITS) or 0
    return EquationResult(equations.IMMUTABILITY, num_days + num_credits, tuple(failures))


# Statements are made once: to build one takes longer than to run it over small books.

_NUM_CREDITS = select(func.count()).select_from(Credit)


@cache
def _wrong_credits() -> tuple[Select[Any], ...]:
    """Selects credits without their row, charges that were corrected by more than they were, and credits that were used
    up more than once."""
    missing = (
        select(Credit.id)
        .outerjoin(LedgerEntry, and_(LedgerEntry.request_id == Credit.id, LedgerEntry.kind == Credit.type))
        .where(
            or_(
                LedgerEntry.request_id.is_(None),
                and_(Credit.type.in_(CORRECTIONS), LedgerEntry.charge != -Credit.amount),
            )
        )
    )
    # A reversal leaves nothing of a charge, so a correction beside it is too much.
    charged = (
        select(func.sum(LedgerEntry.charge))
        .where(
            LedgerEntry.request_id == Credit.corrects_request_id,
            LedgerEntry.kind.in_(BILLED),
            LedgerEntry.tenant_id == Credit.tenant_id,
        )
        .correlate(Credit)
        .scalar_subquery()
    )
    too_much = (
        select(Credit.corrects_request_id)
        .where(Credit.type.in_(CORRECTIONS))
        .group_by(Credit.corrects_request_id, Credit.tenant_id)
        .having(func.sum(Credit.amount) > func.coalesce(charged, 0))
    )
    overdrawn = (
        select(CreditUse.credit_id)
        .join(Credit, Credit.id == CreditUse.credit_id)
        .group_by(CreditUse.credit_id, Credit.amount)
        .having(func.sum(CreditUse.amount) > Credit.amount)
    )
    return missing, too_much, overdrawn


async def _found(conn: AsyncConnection, statements: tuple[Select[str], ...]) -> list[str]:
    return [name for query in statements for name in (await conn.execute(query)).scalars()]


@cache
def _wrong_totals() -> tuple[Select[str], ...]:
    prepaid = func.sum(case((InvoiceLine.kind == "prepaid", -InvoiceLine.amount), else_=0))
    query = (
        select(Invoice.number)
        .outerjoin(InvoiceLine, InvoiceLine.number == Invoice.number)
        .group_by(Invoice.number, Invoice.total, Invoice.prepaid)
        .having(
            or_(
                func.coalesce(func.sum(InvoiceLine.amount), 0) != Invoice.total,
                func.coalesce(prepaid, 0) != Invoice.prepaid,
            )
        )
    )
    # Grants pay an invoice once, however often it is issued again.
    is_first = and_(Invoice.series == invoice_numbers.INVOICE, Invoice.version == 1)
    used = case((CreditUse.kind == "grant_use", CreditUse.amount), else_=0)
    uses = (
        select(Invoice.number)
        .outerjoin(CreditUse, CreditUse.number == Invoice.number)
        .group_by(Invoice.number, Invoice.series, Invoice.version, Invoice.prepaid)
        .having(func.coalesce(func.sum(used), 0) != case((is_first, Invoice.prepaid), else_=0))
    )
    return query, uses


@cache
def _wrong_corrections() -> tuple[Select[str], ...]:
    """Selects the credits of which documents have another amount, and documents with corrections of no credit. An
    adjustment may wait for its invoice."""
    is_its = and_(InvoiceLine.credit_id == Credit.id, InvoiceLine.kind == Credit.type)
    documented = func.coalesce(func.sum(InvoiceLine.amount), 0)
    differing = (
        select(Credit.id)
        .outerjoin(InvoiceLine, is_its)
        .where(Credit.type.in_(CORRECTIONS))
        .group_by(Credit.id, Credit.type, Credit.amount)
        .having(documented != -Credit.amount, or_(documented != 0, Credit.type == "credit_note"))
    )
    of_none = (
        select(InvoiceLine.number)
        .outerjoin(Credit, is_its)
        .where(InvoiceLine.kind.in_(CORRECTIONS), Credit.id.is_(None))
        .distinct()
    )
    return differing, of_none


@cache
def _gaps() -> tuple[Select[str], ...]:
    """Selects the series and the prefixes of which a number is missing."""
    kinds = select(Invoice.series).group_by(Invoice.series).having(func.max(Invoice.sequence) != func.count())
    table = InvoiceTerms
    prefixes = select(table.prefix).group_by(table.prefix).having(func.max(table.place) != func.count())
    return kinds, prefixes
