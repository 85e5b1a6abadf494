"""Numbers of invoices and credit notes: one series each, without a gap.

The next one is the last one's plus 1, read in the transaction that uses it, by whoever has the poster's turn: what
is rolled back leaves no gap, and nobody takes the same one.
"""

from __future__ import annotations

from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.tables.invoice_models import Invoice

Series = Literal["INV", "CN"]
INVOICE: Series = "INV"
CREDIT_NOTE: Series = "CN"


async def following(conn: AsyncConnection, series: Series) -> tuple[str, int]:
    """(number, sequence). The caller holds `ledger.take_turn`."""
    last = await conn.scalar(select(func.max(Invoice.sequence)).where(Invoice.series == series))
    sequence = (last or 0) + 1
    return f"{series}-{sequence:06d}", sequence
