"""A draft of an invoice: its lines, the grants that pay for it and its terms. Nothing is written here, so that a
preview and a close are one computation.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import bindparam, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.billing import credits, grants, invoice_lines, residency_sums
from accounting.billing.grants import Grant
from accounting.billing.invoice_lines import Line, SumsByKey
from accounting.database.paging import one
from accounting.tables.models import RollupDay, RollupHour, Tenant
from accounting.terms import terms
from accounting.terms.terms import Terms
from accounting.values.budget_types import HOUR_S
from accounting.values.errors import ConflictError
from accounting.values.periods import DAY_S, bounds
from accounting.values.types import OPERATOR_TENANT

Uses = list[tuple[Grant, int]]


class Draft(msgspec.Struct, frozen=True, kw_only=True):
    tenant_id: str
    tenant_name: str
    time_zone: str
    period: str
    currency: str
    subtotal: int
    paid: Uses
    """The amount that each grant pays."""
    expired: Uses
    """The rest of each grant that has ended with the period."""
    lines: list[Line]
    days: list[int]
    terms: Terms

    @property
    def prepaid(self) -> int:
        return sum(amount for _, amount in self.paid)


async def of_period(conn: AsyncConnection, tenant_id: str, period: str, sums: SumsByKey, now_ms: int) -> Draft:
    """`sums` are the usage that no invoice has. Raises NotFoundError, also for the operator, and ConflictError if there
    is nothing to invoice or if it is in two currencies."""
    start, end = bounds(period)
    named = select(Tenant.name, Tenant.time_zone).where(Tenant.id == tenant_id, Tenant.id != OPERATOR_TENANT)
    tenant = await one(conn, named, "There is no such tenant.")
    lines = await invoice_lines.of_usage(conn, sums)
    lines += await invoice_lines.of_residency(conn, tenant_id, end)
    lines += await invoice_lines.of_adjustments(conn, tenant_id, now_ms)
    if not lines:
        raise ConflictError(f"There is nothing to invoice for {period}.")
    found = {key.currency for key in sums} | {line.currency for line in lines}
    if len(found) != 1:
        raise ConflictError("The tenant was charged in more than one currency.")
    currency = found.pop()
    subtotal = sum(line.amount for line in lines)
    late = sum(line.amount for line in lines if line.kind == "usage" and line.period != period)
    paid, expired = await _prepaid(conn, tenant_id, currency, period, late, subtotal)
    return Draft(
        tenant_id=tenant_id,
        tenant_name=tenant.name,
        time_zone=tenant.time_zone,
        period=period,
        currency=currency,
        subtotal=subtotal,
        paid=paid,
        expired=expired,
        lines=lines + [invoice_lines.of_grant(grant, amount, period, currency) for grant, amount in paid],
        days=await _days(conn, tenant_id, start, end),
        terms=await _terms(conn, tenant_id, currency, subtotal, paid, now_ms),
    )


async def _terms(conn: AsyncConnection, tenant_id: str, currency: str, subtotal: int, paid: Uses, now_ms: int) -> Terms:
    cash = sum(amount for grant, amount in paid if grant.source == "cash")
    discount = sum(amount for grant, amount in paid) - cash
    return await terms.of_today(conn, tenant_id, currency, subtotal - discount - cash, cash, discount, now_ms)


async def _prepaid(
    conn: AsyncConnection, tenant_id: str, currency: str, period: str, late: int, subtotal: int
) -> tuple[Uses, Uses]:
    """Returns the amount that each grant pays, and the rest of each grant that has ended with the period."""
    start, end = bounds(period)
    hours = await _charges(conn, RollupHour, tenant_id, range(start, end, HOUR_S))
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
    charges = await _charges(conn, RollupDay, tenant_id, range(start, end, DAY_S))
    for hour, charge in (await residency_sums.by_hour(conn, tenant_id, start, end)).items():
        day = hour - hour % DAY_S
        charges[day] = charges.get(day, 0) + charge
    return [charges.get(day, 0) for day in range(start, end, DAY_S)]


async def _charges(
    conn: AsyncConnection, table: type[RollupHour | RollupDay], tenant_id: str, buckets: range
) -> dict[int, int]:
    """Returns the charge of each bucket that has one. Buckets are listed, because rollups have no index that begins
    with a tenant: a range would read those of all tenants."""
    query = select(table.bucket, func.sum(table.charge)).where(
        table.tenant_id == tenant_id, table.bucket.in_(bindparam("buckets", expanding=True))
    )
    found = await conn.execute(query.group_by(table.bucket), {"buckets": list(buckets)})
    return {bucket: int(charge) for bucket, charge in found}
