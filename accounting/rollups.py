"""Sums by minute, hour and day, written in the transaction of the rows they sum. Reports read nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.db import upsert
from accounting.legs import Row
from accounting.models import RollupDay, RollupHour, RollupMinute
from accounting.types import TOKEN_CLASSES

Width = Literal["1m", "1h", "1d"]
TABLES: dict[Width, type[RollupMinute] | type[RollupHour] | type[RollupDay]] = {
    "1m": RollupMinute, "1h": RollupHour, "1d": RollupDay,
}  # fmt: skip
SECONDS: dict[Width, int] = {"1m": 60, "1h": 3_600, "1d": 86_400}

KEYS = ("tenant_id", "key_id", "model", "tier", "price_version", "currency")
SUMS = (*TOKEN_CLASSES, "charge", *(f"charge_{name}" for name in TOKEN_CLASSES))


async def add(conn: AsyncConnection, entries: Sequence[Row]) -> None:
    """Adds new settle entries to the buckets of their requests' start."""
    if not entries:
        return
    for width, table in TABLES.items():
        statement = upsert(conn, table.__table__)
        sums = {
            name: table.__table__.c[name] + statement.excluded[name]
            for name in ("num_requests", *SUMS)
        }
        await conn.execute(
            statement.on_conflict_do_update(index_elements=["bucket", *KEYS], set_=sums),
            summed(entries, SECONDS[width]),
        )


def summed(entries: Sequence[Row], width_s: int) -> list[dict[str, Any]]:
    """One row per bucket and key, sorted by key so that two writers lock in one order."""
    buckets: dict[tuple[Any, ...], dict[str, Any]] = {}
    for entry in entries:
        start = entry["opened_at_ms"] // 1000
        key = (start - start % width_s, *(entry[name] for name in KEYS))
        row = buckets.get(key)
        if row is None:
            row = buckets[key] = dict.fromkeys(("num_requests", *SUMS), 0)
            row.update(zip(("bucket", *KEYS), key, strict=True))
        row["num_requests"] += 1
        for name in SUMS:
            row[name] += entry[name]
    return [buckets[key] for key in sorted(buckets)]
