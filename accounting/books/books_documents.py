"""The equation of rounding (I19): what documents ask for and carry on. The module writes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.books import equations
from accounting.books.equations import EquationResult
from accounting.tables.billing_models import InvoiceTerms
from accounting.tables.invoice_models import Invoice
from accounting.terms.amounts import tax_on
from accounting.values.currencies import unit, written

WHOLE = ("net", "tax_amount", "paid", "due")
COLUMNS = ("number", "place", *WHOLE, "tax_rate", "decimals", "carried_in", "carried_out", "refers_to", "voids")


async def rounding(conn: AsyncConnection) -> EquationResult:
    """Checks for each document `net - paid + carried_out = total + carried_in`, whole units, the tax, and for each
    tenant and currency that every remainder is taken over by the next document."""
    table = InvoiceTerms
    query = (
        select(
            *(getattr(table, name) for name in COLUMNS),
            Invoice.total,
            Invoice.tenant_id,
            Invoice.currency,
            Invoice.series,
        )
        .join(Invoice, Invoice.number == table.number)
        .order_by(Invoice.created_at, Invoice.series, table.place)
    )
    rows = (await conn.execute(query)).all()
    failures = [row.number for row in rows if not _holds(row)]
    failures += _lost(rows)
    failures += _pairs(rows)
    return EquationResult(equations.ROUNDING, len(rows), tuple(failures))


def _holds(row: Any) -> bool:
    whole = all(getattr(row, name) % unit(row.decimals) == 0 for name in WHOLE)
    adds_up = row.net - row.paid + row.carried_out == row.total + row.carried_in
    return whole and adds_up and row.tax_amount == tax_on(row.net, row.tax_rate, unit(row.decimals))


def _lost(rows: Sequence[Any]) -> list[str]:
    """Returns the tenants whose remainders do not form one chain: each document's `carried_in` is what some other one
    carried on, or 0 for the first, so that the sets of both are equal but for the first and the last."""
    rest: dict[tuple[str, str], Counter[int]] = {}
    failures: dict[str, None] = {}
    for row in rows:
        mine = rest.setdefault((row.tenant_id, row.currency), Counter({0: 1}))
        mine[row.carried_out] += 1
        mine[row.carried_in] -= 1
    for (tenant_id, currency), counts in rest.items():
        for amount, number in counts.items():
            if number < 0:
                failures[f"remainders of {tenant_id}: {written(amount, currency)} {currency} from nowhere"] = None
    return list(failures)


def _pairs(rows: Sequence[Any]) -> list[str]:
    """A credit note that cancels takes back exactly what its invoice asked for."""
    by_number = {row.number: row for row in rows}
    return [
        row.number
        for row in rows
        if row.voids and any(getattr(row, name) != -getattr(by_number[row.refers_to], name) for name in WHOLE)
    ]
