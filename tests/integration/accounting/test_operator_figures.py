"""Figures for operators, on both dialects: sums by tenant, kept KV by tenant, refusals and waits of the last minutes."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert

from accounting.billing import residency_sums
from accounting.billing.residency_sums import HOUR_MS, TenantKept
from accounting.database.db import Database
from accounting.ledger import rollups
from accounting.requests import request_log, request_log_figures
from accounting.requests.request_log import LoggedRequest
from accounting.requests.request_log_figures import Queued, Refused
from accounting.tables.models import RollupMinute
from accounting.tables.residency_models import ResidencyCharge, ResidencyReading
from accounting.values import timelines
from accounting.values.timelines import entry
from accounting.values.types import OPERATOR_TENANT, Usage

NOW_MS = 1_700_000_000_000
MARKS = [entry("accepted", 0), entry("dispatched", 1_000), entry("finished", 90_000)]


def minute(bucket: int, tenant_id: str, tier: str = "interactive", **sums: int) -> dict[str, Any]:
    keys = {"bucket": bucket, "tenant_id": tenant_id, "key_id": "k", "model": "m", "tier": tier}
    return {**keys, "price_version": "1", "currency": "USD", **dict.fromkeys(rollups.COUNTED, 0), **sums}


def logged(number: int, tenant_id: str, at_ms: int = NOW_MS, wait_ms: int = 0, **fields: Any) -> LoggedRequest:
    worker = [entry("queued", 0), entry("matched", wait_ms * 1000), entry("finished", 80_000)]
    defaults = {
        "request_id": f"{request_log.id_at(at_ms)}{number:020x}",
        "is_tail": fields.get("outcome", "ok") != "ok",
        "started_at_ms": at_ms,
        "tenant_id": tenant_id,
        "key_id": "k",
        "endpoint": "POST /v1/completions",
        "tier": "interactive",
        "status": 200,
        "outcome": "ok",
        "timeline": timelines.pack(MARKS, worker),
    }
    return LoggedRequest(**{**defaults, **fields})


async def test_sums_by_tenant_are_of_the_buckets_and_the_tier_that_were_asked_for(db: Database) -> None:
    rows = [
        minute(60, "early", uncached=100),
        minute(120, "a", num_requests=2, cache_read=5, uncached=10, output=3),
        minute(180, "a", num_requests=1, cache_write=7, output=1),
        minute(180, "b", num_requests=1, uncached=90),
        minute(180, "b", "batch", num_requests=1, uncached=1000),
        minute(180, OPERATOR_TENANT, num_requests=1, uncached=5000),
    ]
    async with db.write() as conn:
        await conn.execute(insert(RollupMinute), rows)
        found = await rollups.by_tenant(conn, "1m", 130, tier="interactive")
        assert found == [("b", 1, Usage(uncached=90)), ("a", 3, Usage(5, 7, 10, 4))]
        assert [one.tenant_id for one in await rollups.by_tenant(conn, "1m", 130, limit=1)] == ["b"]


async def test_kept_kv_by_tenant_counts_all_workers_and_what_was_charged(db: Database) -> None:
    readings = [
        {"hour": hour, "tenant_id": tenant, "model": "m", "process": process, "cache": 3 * HOUR_MS, "pinned": HOUR_MS}
        for hour, tenant, process in ((0, "a", "p"), (3600, "a", "p"), (3600, "a", "q"), (3600, "b", "p"))
    ]
    charge = {
        **{"request_id": "r", "attempt": 0, "tenant_id": "a", "model": "m", "hour": 3600, "price_version": "1"},
        **{"currency": "USD", "cache": 1, "pinned": 1, "charge_cache": 5, "charge_pinned": 2, "posted_at_ms": 1},
    }
    async with db.write() as conn:
        await conn.execute(insert(ResidencyReading), readings)
        await conn.execute(insert(ResidencyCharge), [charge])
        found = await residency_sums.by_tenant(conn, 3600, ["a", "c"])
    assert found == {"a": TenantKept(6, 2, {"USD": 7})}


async def test_refusals_and_waits_are_those_since_a_moment(db: Database) -> None:
    refused = {"status": 429, "outcome": "refused", "error_code": "rate_limit_exceeded"}
    rows = [
        logged(0, "a", NOW_MS - 60_000, **refused),
        logged(1, "a", **refused),
        logged(2, "a", **refused),
        logged(3, "b", status=429, outcome="refused", error_code="budget_exhausted"),
        logged(4, "b", status=500, outcome="server_error", error_code="internal_error", timeline=""),
        logged(5, "c", wait_ms=10),
        logged(6, "c", wait_ms=30),
        logged(7, "c", wait_ms=70, tier="batch"),
    ]
    async with db.write() as conn:
        await request_log.add(conn, rows)
        found = await request_log_figures.refused(conn, NOW_MS)
        waits = await request_log_figures.queued(conn, NOW_MS, "interactive")
    assert found == [Refused("a", "rate_limit_exceeded", 2), Refused("b", "budget_exhausted", 1)]
    assert waits["c"] == Queued(2, 20.0, 30.0)
