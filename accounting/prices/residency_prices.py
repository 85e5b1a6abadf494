"""Prices of KV that is kept for tenants, for many tenants and hours at once. They are read by two statements, because
the writer's transaction waits for them. `prices.py` writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec
from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.prices.prices import DEFAULT_SHEET
from accounting.tables.invoice_models import PriceResidency
from accounting.tables.models import PriceAssignment, PriceSheet, PriceSheetVersion
from accounting.tables.residency_models import ResidencyReading

T = TypeVar("T")
Spans = Sequence[tuple[int, int | None, T]]
"""Values with the half-open intervals, in milliseconds, in which they are in force. They do not overlap."""


class ResidencyPrice(msgspec.Struct, frozen=True):
    version: str
    currency: str
    rates: tuple[int, int]
    """The rates of the cache and of pinned prefixes."""


Versions = Mapping[tuple[str, str], Spans[ResidencyPrice]]
"""Prices by sheet and model."""
Sheets = Mapping[str, Spans[str]]
"""The own sheets of tenants."""


async def versions(conn: AsyncConnection) -> Versions:
    """Returns the prices that were in force at the earliest reading or later."""
    query = (
        select(PriceResidency.__table__, PriceSheet.currency, PriceSheetVersion.from_ms, PriceSheetVersion.until_ms)
        .join(
            PriceSheetVersion,
            and_(
                PriceSheetVersion.sheet_id == PriceResidency.sheet_id,
                PriceSheetVersion.version == PriceResidency.version,
            ),
        )
        .join(PriceSheet, PriceSheet.id == PriceResidency.sheet_id)
        .where(_still_matters(PriceSheetVersion))
    )
    found: dict[tuple[str, str], list[tuple[int, int | None, ResidencyPrice]]] = {}
    for row in await conn.execute(query):
        price = ResidencyPrice(f"{row.sheet_id}@{row.version}", row.currency, (row.cache, row.pinned))
        found.setdefault((row.sheet_id, row.model), []).append((row.from_ms, row.until_ms, price))
    return found


async def sheets(conn: AsyncConnection) -> Sheets:
    """Returns the sheets that tenants had of their own at the earliest reading or later."""
    table = PriceAssignment
    query = select(table.tenant_id, table.from_ms, table.until_ms, table.sheet_id).where(_still_matters(table))
    found: dict[str, list[tuple[int, int | None, str]]] = {}
    for tenant_id, from_ms, until_ms, sheet_id in await conn.execute(query):
        found.setdefault(tenant_id, []).append((from_ms, until_ms, sheet_id))
    return found


def price(prices: Versions, own: Sheets, tenant_id: str, model: str, at_ms: int) -> ResidencyPrice | None:
    """Returns the price in force at that time, or None if kept KV is not charged."""
    sheet = _at(own.get(tenant_id, ()), at_ms) or DEFAULT_SHEET
    return _at(prices.get((sheet, model), ()), at_ms)


def _still_matters(table: type[PriceAssignment] | type[PriceSheetVersion]) -> ColumnElement[bool]:
    earliest = select(func.min(ResidencyReading.hour) * 1000).scalar_subquery()
    return or_(table.until_ms.is_(None), table.until_ms > earliest)


def _at(spans: Spans[T], at_ms: int) -> T | None:
    for from_ms, until_ms, value in spans:
        if from_ms <= at_ms and (until_ms is None or at_ms < until_ms):
            return value
    return None
