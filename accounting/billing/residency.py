"""Charges for KV that caches keep for tenants. Workers report readings by the hour, and each hour becomes its own
ledger entries.

There is a charge only if a price sheet has a rate for it. An hour is charged ten minutes after its end, at the sheet
that was in force when it began. A reading that comes later, within two days, is charged as a separate entry. Amounts
are integers throughout: byte-milliseconds times micro-units per GB (10^9 bytes) and hour, rounded once per entry.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import case, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import insert_all, upsert
from accounting.ledger import ledger
from accounting.prices import pricing, residency_prices
from accounting.prices.residency_prices import ResidencyPrice
from accounting.tables.models import Tenant
from accounting.tables.residency_models import ResidencyCharge, ResidencyReading
from accounting.values.types import OPERATOR_TENANT, RESIDENCY

HOUR_S = 3_600
GRACE_MS = 600_000
KEPT_MS = 2 * 86_400_000
SUMS = ("cache", "pinned")


class Reading(msgspec.Struct, frozen=True):
    """Byte-milliseconds of one hour so far, as one worker process counted them."""

    hour: int
    tenant_id: str
    model: str
    process: str
    cache: int
    pinned: int


class Hour(NamedTuple):
    hour: int
    tenant_id: str
    model: str

    @property
    def event(self) -> str:
        return f"residency:{self.tenant_id}:{self.model}:{self.hour}"


class Kept(msgspec.Struct, frozen=True):
    cache: int = 0
    pinned: int = 0
    num_charges: int = 0


async def note(conn: AsyncConnection, readings: Sequence[Reading]) -> None:
    """Stores readings. They may come in any order and repeatedly: the highest of each counts."""
    if not readings:
        return
    table = ResidencyReading.__table__
    statement = upsert(conn, table)
    highest = {
        name: case((statement.excluded[name] > table.c[name], statement.excluded[name]), else_=table.c[name])
        for name in SUMS
    }
    keys = ["hour", "tenant_id", "model", "process"]
    rows = sorted(readings, key=lambda one: (one.hour, one.tenant_id, one.model, one.process))
    await conn.execute(
        statement.on_conflict_do_update(index_elements=keys, set_=highest),
        [msgspec.structs.asdict(one) for one in rows],
    )


async def charge_due(conn: AsyncConnection, now_ms: int) -> int:
    """Posts the KV that was kept in hours that are over and was not charged yet. Returns the number of entries."""
    now_ms = await ledger.take_turn(conn, now_ms)
    versions = await residency_prices.versions(conn)
    num_posted = await _charge_left(conn, versions, now_ms) if versions else 0
    gone = ResidencyReading.hour < (now_ms - KEPT_MS) // 1000
    await conn.execute(delete(ResidencyReading).where(gone))
    return num_posted


async def _charge_left(conn: AsyncConnection, versions: residency_prices.Versions, now_ms: int) -> int:
    """Posts what is left to be charged. All postings wait meanwhile, so the number of statements does not grow with the
    readings, but only with the entries."""
    kept = await _kept(conn, (now_ms - GRACE_MS) // 1000 - HOUR_S, {model for _, model in versions})
    had = await _had(conn, kept)
    left = {hour: rest for hour in sorted(kept) if any(rest := _rest(kept[hour], had.get(hour, Kept())))}
    if not left:
        return 0
    sheets = await residency_prices.sheets(conn)
    num_posted = 0
    for hour, rest in left.items():
        price = residency_prices.price(versions, sheets, hour.tenant_id, hour.model, hour.hour * 1000)
        if price is not None:
            num_charges = had.get(hour, Kept()).num_charges
            num_posted += await _charge(conn, hour, rest, price, num_charges, now_ms)
    return num_posted


def _rest(kept: Kept, had: Kept) -> tuple[int, int]:
    return max(0, kept.cache - had.cache), max(0, kept.pinned - had.pinned)


async def _kept(conn: AsyncConnection, last: int, models: Collection[str]) -> dict[Hour, Kept]:
    table = ResidencyReading
    keys = (table.hour, table.tenant_id, table.model)
    query = (
        select(*keys, func.sum(table.cache), func.sum(table.pinned))
        .join(Tenant, Tenant.id == table.tenant_id)
        .where(table.hour <= last, table.tenant_id != OPERATOR_TENANT, table.model.in_(sorted(models)))
        .group_by(*keys)
    )
    return {Hour(*row[:3]): Kept(int(row[3]), int(row[4])) for row in await conn.execute(query)}


async def _had(conn: AsyncConnection, kept: Mapping[Hour, Kept]) -> dict[Hour, Kept]:
    if not kept:
        return {}
    table = ResidencyCharge
    keys = (table.hour, table.tenant_id, table.model)
    query = (
        select(*keys, func.sum(table.cache), func.sum(table.pinned), func.count())
        .where(table.hour >= min(hour.hour for hour in kept))
        .group_by(*keys)
    )
    return {Hour(*row[:3]): Kept(int(row[3]), int(row[4]), int(row[5])) for row in await conn.execute(query)}


async def _charge(
    conn: AsyncConnection, hour: Hour, rest: tuple[int, int], price: ResidencyPrice, num_charges: int, now_ms: int
) -> int:
    """Posts an entry for the rest of one hour. Returns 1, or 0 if the rest costs less than half a micro-unit."""
    charged = pricing.residency_charge(rest, price.rates)
    if not sum(charged):
        return 0
    row = {
        "request_id": hour.event,
        "attempt": num_charges,
        "tenant_id": hour.tenant_id,
        "model": hour.model,
        "hour": hour.hour,
        "price_version": price.version,
        "currency": price.currency,
        "cache": rest[0],
        "pinned": rest[1],
        "charge_cache": charged[0],
        "charge_pinned": charged[1],
        "posted_at_ms": now_ms,
    }
    await ledger.post_transfer(conn, _entry(row), "tenant_receivable", "revenue", sum(charged))
    await insert_all(conn, ResidencyCharge.__table__, [row])
    return 1


def _entry(row: dict[str, Any]) -> dict[str, Any]:
    blank = ledger.blank(
        RESIDENCY, row["request_id"], row["attempt"], row["tenant_id"], row["currency"], row["posted_at_ms"]
    )
    begins, ends = row["hour"] * 1000, (row["hour"] + HOUR_S) * 1000
    return blank | {
        "model": row["model"],
        "price_version": row["price_version"],
        "opened_at_ms": begins,
        "ended_at_ms": ends,
    }
