"""Price sheets as the operator sees them: versions with all their rates, and the sheet of each tenant by time."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import Row, select, tuple_
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.paging import Page, one, shaped
from accounting.prices.prices import covers
from accounting.tables.invoice_models import PriceResidency
from accounting.tables.models import PriceAssignment, PriceRate, PriceSheet, PriceSheetVersion
from accounting.values.errors import InvalidError, NotFoundError
from accounting.values.types import Rates, Tier

TIERS: tuple[Tier, ...] = ("batch", "interactive")


class PricedModel(msgspec.Struct, frozen=True):
    model: str
    tier: Tier
    rates: Rates


class Residency(msgspec.Struct, frozen=True):
    """Prices of kept KV: micro-units per GB and hour."""

    model: str
    cache: int
    pinned: int


class SheetVersion(msgspec.Struct, frozen=True):
    sheet: str
    version: int
    currency: str
    from_ms: int
    until_ms: int | None
    created_at: int
    rates: list[PricedModel]
    residency: list[Residency]

    @property
    def id(self) -> str:
        return f"{self.sheet}@{self.version}"


class Assignment(msgspec.Struct, frozen=True):
    tenant_id: str
    sheet: str
    from_ms: int
    until_ms: int | None


async def get(conn: AsyncConnection, sheet: str, version: int) -> SheetVersion:
    query = _versions().where(PriceSheetVersion.sheet_id == sheet, PriceSheetVersion.version == version)
    return await _with_rates(conn, await one(conn, query, f"There is no price sheet {sheet}@{version}."))


async def list_versions(conn: AsyncConnection, *, after: str | None, limit: int) -> Page[SheetVersion]:
    """Returns versions ordered by sheet, newest version first."""
    order = (PriceSheetVersion.sheet_id, PriceSheetVersion.version.desc())
    query = _versions().order_by(*order).limit(limit + 1)
    if after is not None:
        sheet, version = split(after)
        behind = tuple_(PriceSheetVersion.sheet_id, -PriceSheetVersion.version)
        query = query.where(behind > tuple_(sheet, -version))
    rows = (await conn.execute(query)).all()
    return Page([await _with_rates(conn, row) for row in rows[:limit]], len(rows) > limit)


async def at(conn: AsyncConnection, sheet: str, at_ms: int) -> SheetVersion | None:
    """Returns the version in force at that time."""
    row = (
        await conn.execute(_versions().where(PriceSheetVersion.sheet_id == sheet, covers(PriceSheetVersion, at_ms)))
    ).first()
    return None if row is None else await _with_rates(conn, row)


def unpriced(found: SheetVersion | None, models: Collection[str]) -> list[tuple[str, Tier]]:
    """Returns the (model, tier) pairs of these models that have no rates in the version."""
    rates = () if found is None else found.rates
    priced = {(rate.model, rate.tier) for rate in rates}
    return [(model, tier) for model in sorted(models) for tier in TIERS if (model, tier) not in priced]


async def versions_of(conn: AsyncConnection, sheet: str) -> list[SheetVersion]:
    """Returns all versions of one sheet. Raises NotFoundError."""
    query = _versions().where(PriceSheetVersion.sheet_id == sheet)
    rows = (await conn.execute(query.order_by(PriceSheetVersion.version))).all()
    if not rows:
        raise NotFoundError(f"There is no price sheet {sheet}.")
    return [await _with_rates(conn, row) for row in rows]


async def assignments(conn: AsyncConnection, tenant_id: str) -> list[Assignment]:
    """Returns the tenant's assignments in order of time."""
    query = (
        select(PriceAssignment.__table__)
        .where(PriceAssignment.tenant_id == tenant_id)
        .order_by(PriceAssignment.from_ms)
    )
    return [Assignment(row.tenant_id, row.sheet_id, row.from_ms, row.until_ms) for row in await conn.execute(query)]


def split(price_version: str) -> tuple[str, int]:
    """Splits `<sheet>@<n>`. Raises InvalidError."""
    sheet, _, number = price_version.rpartition("@")
    if not sheet or not number.isascii() or not number.isdigit() or len(number) > 9:
        raise InvalidError("A version of a price sheet is written <sheet>@<number>.")
    return sheet, int(number)


def _versions() -> Any:
    return select(PriceSheetVersion.__table__, PriceSheet.currency).join(
        PriceSheet, PriceSheet.id == PriceSheetVersion.sheet_id
    )


async def _with_rates(conn: AsyncConnection, row: Row[Any]) -> SheetVersion:
    rates = select(PriceRate.__table__).where(PriceRate.sheet_id == row.sheet_id, PriceRate.version == row.version)
    residency = select(PriceResidency.__table__).where(
        PriceResidency.sheet_id == row.sheet_id, PriceResidency.version == row.version
    )
    return shaped(
        SheetVersion,
        row,
        sheet=row.sheet_id,
        rates=[
            PricedModel(r.model, r.tier, shaped(Rates, r))
            for r in await conn.execute(rates.order_by(PriceRate.model, PriceRate.tier))
        ],
        residency=[shaped(Residency, r) for r in await conn.execute(residency.order_by(PriceResidency.model))],
    )
