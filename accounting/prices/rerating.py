"""A what-if: the price of a period by another sheet, from the stored usage. The module writes nothing."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.prices import price_lists
from accounting.prices.price_lists import SheetVersion
from accounting.prices.prices import rates_in
from accounting.prices.repricing import charge_of, num_settled, settled
from accounting.tables.models import LedgerEntry
from accounting.values.errors import InvalidError
from accounting.values.periods import bounds
from accounting.values.progress import Told, nobody
from accounting.values.types import BILLED, TOKEN_CLASSES, Rates, Tier

TOLD_EACH = 1000
"""The rows after which it is told how many are done."""


class LineKey(NamedTuple):
    tenant_id: str
    currency: str
    model: str
    tier: Tier
    token_class: str


class Difference(msgspec.Struct, frozen=True):
    tenant_id: str
    currency: str
    model: str
    tier: Tier
    token_class: str
    quantity: int
    charged: int
    rerated: int

    @property
    def difference(self) -> int:
        return self.rerated - self.charged


async def rerate(
    conn: AsyncConnection, period: str, sheet: str, tenant_id: str | None = None, told: Told = nobody
) -> list[Difference]:
    """Prices the period by `sheet`: by the version that was in force at each request's start, or by one version
    `<sheet>@<n>` for all. Returns sums per tenant, currency, model, tier and class. Raises InvalidError if the sheet
    lacks a price, or if it is in another currency than what was charged: no rate of exchange is known here."""
    start, end = bounds(period)
    versions = await _versions(conn, sheet)
    where = [LedgerEntry.opened_at_ms >= start * 1000, LedgerEntry.opened_at_ms < end * 1000]
    if tenant_id is not None:
        where.append(LedgerEntry.tenant_id == tenant_id)
    await _check_currency(conn, versions.currency, sheet, where)
    sums: dict[LineKey, list[int]] = {}
    num_rows = await num_settled(conn, *where) if told is not nobody else 0
    num_done = 0
    async for row in settled(conn, *where):
        num_done += 1
        if num_done % TOLD_EACH == 0:
            told(num_done, num_rows)
        new = charge_of(row, versions.at(row.opened_at_ms, row.model, row.tier))
        for name in TOKEN_CLASSES:
            line = sums.setdefault(LineKey(row.tenant_id, row.currency, row.model, row.tier, name), [0, 0, 0])
            line[0] += getattr(row, name)
            line[1] += getattr(row, f"charge_{name}")
            line[2] += getattr(new, name)
    return [Difference(*key, *sums[key]) for key in sorted(sums) if any(sums[key])]


async def _check_currency(conn: AsyncConnection, currency: str, sheet: str, where: list[ColumnElement[bool]]) -> None:
    other = select(LedgerEntry.tenant_id, LedgerEntry.currency).where(
        LedgerEntry.kind.in_(BILLED), LedgerEntry.currency != currency, *where
    )
    found = (await conn.execute(other.limit(1))).first()
    if found is not None:
        raise InvalidError(
            f"{sheet} is in {currency}, and {found.tenant_id} was charged in {found.currency}:"
            f" name a sheet in {found.currency}, or the tenants one by one with --tenant."
        )


class _Versions:
    def __init__(self, name: str, versions: list[SheetVersion], always: bool) -> None:
        self._name = name
        self._always = always
        self.currency = versions[0].currency
        self._tables = [(v, {(r.model, r.tier): r.rates for r in v.rates}) for v in versions]

    def at(self, at_ms: int, model: str, tier: Tier) -> Rates:
        for version, rates in self._tables:
            ends = version.until_ms
            if self._always or (version.from_ms <= at_ms and (ends is None or at_ms < ends)):
                found = rates_in(rates, model, tier)
                if found is not None:
                    return found
        raise InvalidError(f"{self._name} has no price for {model}, {tier}, for all of that period.")


async def _versions(conn: AsyncConnection, sheet: str) -> _Versions:
    if "@" in sheet:
        one = await price_lists.get(conn, *price_lists.split(sheet))
        return _Versions(sheet, [one], always=True)
    return _Versions(sheet, await price_lists.versions_of(conn, sheet), always=False)
