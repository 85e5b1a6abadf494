"""Settled rows priced once more from their usage. Invoices are reconciled with the result, and it also gives the price
by another sheet.

The module writes nothing. Rows are streamed, so a month of millions of rows needs no memory; each takes some
microseconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import CTE, ColumnElement, FromClause, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.prices import pricing
from accounting.prices.prices import RateTable, rates_in, version_rates
from accounting.tables.models import LedgerEntry
from accounting.values.periods import month_start
from accounting.values.types import BILLED, TOKEN_CLASSES, Charge, Rates, Tier, Usage

ENTRIES: FromClause = LedgerEntry.__table__
ROWS_AT_ONCE = 2_000
MAX_WRONG = 20
COLUMNS = (
    "request_id",
    "kind",
    "tenant_id",
    "opened_at_ms",
    "model",
    "tier",
    "price_version",
    "currency",
    *TOKEN_CLASSES,
    "charge",
    *(f"charge_{name}" for name in TOKEN_CLASSES),
)


class Key(NamedTuple):
    """The key of one group of invoice lines."""

    bucket: int
    """The first second of the month of the usage."""
    model: str
    tier: Tier
    price_version: str
    currency: str


class Sums:
    """Sums of requests, and of tokens and micro-units by class."""

    __slots__ = ("amounts", "num_requests", "tokens")

    def __init__(self, num_requests: int = 0) -> None:
        self.num_requests = num_requests
        self.tokens = [0] * len(TOKEN_CLASSES)
        self.amounts = [0] * len(TOKEN_CLASSES)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sums) and self._values() == other._values()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __bool__(self) -> bool:
        return any((self.num_requests, *self.tokens, *self.amounts))

    def _values(self) -> tuple[int, list[int], list[int]]:
        return self.num_requests, self.tokens, self.amounts


def not_empty(sums: dict[Key, Sums]) -> dict[Key, Sums]:
    """Returns the groups in which anything is left. A group whose requests were all reversed has nothing left, and no
    invoice has a line of it."""
    return {key: rest for key, rest in sums.items() if rest}


class Repriced:
    """Sums over rows, each priced by the version that its request was opened with, and the ids of rows whose stored
    charge differs."""

    def __init__(self) -> None:
        self.sums: dict[Key, Sums] = {}
        self.wrong: list[str] = []
        self.num_rows = 0
        self._rates = RatesByVersion()

    async def add(self, conn: AsyncConnection, *where: ColumnElement[bool], among: FromClause = ENTRIES) -> None:
        async for row in settled(conn, *where, among=among):
            rates = await self._rates.of(conn, row.price_version, row.model, row.tier)
            self.num_rows += 1
            priced = None if rates is None else charge_of(row, rates)
            if priced != _stored(row) and len(self.wrong) < MAX_WRONG:
                self.wrong.append(row.request_id)
            self._count(row, priced or Charge(0, 0, 0, 0, 0))

    def _count(self, row: Any, charge: Charge) -> None:
        bucket = month_start(row.opened_at_ms // 1000)
        key = Key(bucket, row.model, row.tier, row.price_version, row.currency)
        sums = self.sums.get(key)
        if sums is None:
            sums = self.sums[key] = Sums()
        sums.num_requests += sign_of(row)
        for i, name in enumerate(TOKEN_CLASSES):
            sums.tokens[i] += getattr(row, name)
            sums.amounts[i] += getattr(charge, name)


class RatesByVersion:
    """Rates by version. They are immutable, so each version is read once."""

    def __init__(self) -> None:
        self._known: dict[str, RateTable] = {}

    async def of(self, conn: AsyncConnection, version: str, model: str, tier: Tier) -> Rates | None:
        if version not in self._known:
            self._known[version] = await version_rates(conn, version)
        return rates_in(self._known[version], model, tier)


def posted_since(since_ms: int) -> CTE:
    """Selects entries posted at or after `since_ms`. It is materialized, so that the index on the posting time is used
    even if a tenant is asked for too."""
    query = select(ENTRIES).where(LedgerEntry.posted_at_ms >= since_ms)
    return query.cte("posted").prefix_with("MATERIALIZED")


async def settled(
    conn: AsyncConnection, *where: ColumnElement[bool], among: FromClause = ENTRIES
) -> AsyncIterator[Any]:
    """Yields the billed rows of `among`, to whose columns the conditions belong."""
    query = select(*(among.c[name] for name in COLUMNS))
    query = query.where(among.c.kind.in_(BILLED), *where)
    async with conn.stream(query.execution_options(yield_per=ROWS_AT_ONCE)) as rows:
        async for row in rows:
            yield row


async def num_settled(conn: AsyncConnection, *where: ColumnElement[bool]) -> int:
    """Returns how many rows `settled` yields."""
    query = select(func.count()).select_from(LedgerEntry).where(LedgerEntry.kind.in_(BILLED), *where)
    return int(await conn.scalar(query) or 0)


def charge_of(row: Any, rates: Rates) -> Charge:
    """Returns the price of a row's tokens. For a reversal it is negative: the price that they had."""
    sign = sign_of(row)
    charge = pricing.charge(Usage(*(sign * getattr(row, name) for name in TOKEN_CLASSES)), rates)
    return Charge(*(sign * amount for amount in msgspec.structs.astuple(charge)))


def sign_of(row: Any) -> int:
    return -1 if row.kind == "reversal" else 1


def _stored(row: Any) -> Charge:
    return Charge(row.charge, *(getattr(row, f"charge_{name}") for name in TOKEN_CLASSES))
