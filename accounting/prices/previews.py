"""The effect that a new version of a sheet would have had: recent usage under that sheet, priced by the new rates.

The usage comes from the day sums, so a preview is fast whatever the number of requests. It prices the sum of a model
and tier once, where a ledger row is rounded by itself: the two differ by less than one micro-unit for each request.
`rerating.py` prices row by row. The module writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from sqlalchemy import BigInteger, cast, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.prices import pricing
from accounting.prices.prices import RateTable
from accounting.tables.models import RollupDay
from accounting.values.periods import DAY_S
from accounting.values.types import TOKEN_CLASSES, Tier, Usage

NUM_DAYS = 7


class Effect(msgspec.Struct, frozen=True):
    """The effect on one model and tier. `priced` is None where the new version has no price, so that requests would be
    refused."""

    model: str
    tier: Tier
    num_requests: int
    usage: Usage
    charged: int
    priced: int | None


async def effects(conn: AsyncConnection, sheet: str, rates: RateTable, now: int) -> Sequence[Effect]:
    """Return the effects on the usage of the last `NUM_DAYS` UTC days, today among them, that any version of the sheet
    was charged for."""
    keys = (RollupDay.model, RollupDay.tier)
    sums = ("num_requests", *TOKEN_CLASSES, "charge")
    totals = [cast(func.sum(getattr(RollupDay, name)), BigInteger).label(name) for name in sums]
    first = now - now % DAY_S - (NUM_DAYS - 1) * DAY_S
    is_of_sheet = func.substr(RollupDay.price_version, 1, len(sheet) + 1) == f"{sheet}@"
    query = select(*keys, *totals)
    query = query.where(RollupDay.bucket >= first, is_of_sheet).group_by(*keys).order_by(*keys)
    return [_effect(rates, row._mapping) for row in await conn.execute(query)]


def _effect(rates: RateTable, row: Mapping[Any, Any]) -> Effect:
    usage, new = Usage(*(row[name] for name in TOKEN_CLASSES)), rates.get((row["model"], row["tier"]))
    priced = None if new is None else pricing.charge(usage, new).total
    return Effect(row["model"], row["tier"], row["num_requests"], usage, row["charge"], priced)
