"""Numbers of invoices and credit notes: each series has no gap.

The next number is the last one plus 1, read in the transaction that uses it, by the holder of the poster's turn. A
transaction that is rolled back therefore leaves no gap, and nobody takes the same number.
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
    """Return (number, sequence) of the next document. The caller holds `ledger.take_turn`."""
    last = await conn.scalar(select(func.max(Invoice.sequence)).where(Invoice.series == series))
    sequence = (last or 0) + 1
    return f"{series}-{sequence:06d}", sequence
