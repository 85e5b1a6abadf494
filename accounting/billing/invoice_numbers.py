"""The two kinds of documents, and their order: each kind counts from 1 without a gap, over all prefixes of numbers.

The next place is the last one plus 1, read in the transaction that uses it, by the holder of the poster's turn. A
transaction that is rolled back therefore leaves no gap, and nobody takes the same place. The printed number counts the
documents of its prefix in the same way (`accounting/terms/terms.py`).
"""

from __future__ import annotations

from typing import Literal

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.tables.invoice_models import Invoice

Series = Literal["INV", "CN"]
INVOICE: Series = "INV"
CREDIT_NOTE: Series = "CN"


async def following(conn: AsyncConnection, series: Series) -> int:
    """Returns the place of the next document of the kind. The caller holds `ledger.take_turn`."""
    last = await conn.scalar(select(func.max(Invoice.sequence)).where(Invoice.series == series))
    return (last or 0) + 1
