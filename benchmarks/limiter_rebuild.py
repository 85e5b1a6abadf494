"""How long the limiter takes to be made again for many tenants, who ask 512 at a time after Redis forgot everything.

Each tenant has two budgets and two endings of the last minute; every tenth has a request that runs. PostgreSQL by URL
(a database of its own, dropped at the end), a Redis of its own. Prints the seconds until the last tenant is admitted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from metering import Postgres, own_redis
from metering_load import CURRENCY, MODEL, PRICE, ROOT, percentiles
from sqlalchemy import insert

from accounting.database.db import Database
from accounting.requests import request_postings
from accounting.tables.budget_models import BudgetRow
from accounting.tables.models import Tenant
from accounting.values.budget_types import Budget
from accounting.values.types import Charge, Limits, Posting, Principal, Usage
from gateway.base.redis_link import LimiterUnavailable
from gateway.limiter.limits import Limiter, limiter_link
from gateway.limiter.rules import LimitSubject

LADDER = [(128, 1280), (64, 640), (1, 10)]
RUNNING_EVERY = 10
AT_ONCE = 512
AGAIN_S = 0.25
CHUNK = 2_000


def budgets_of(tenant_id: str) -> tuple[Budget, ...]:
    kinds = ("month", "day")
    return tuple(
        Budget(id=f"{kind}_{tenant_id}", tenant_id=tenant_id, period=kind, limit_micro_units=10**12) for kind in kinds
    )


def holder(tenant_id: str, name: str) -> LimitSubject:
    limits = Limits(requests_per_minute=10**6, tokens_per_minute=10**9, concurrency=10**4)
    principal = Principal(
        "tenant",
        tenant_id,
        f"key_{tenant_id}",
        frozenset(),
        tenant_limits=limits,
        key_limits=limits,
        budgets=budgets_of(tenant_id),
    )
    now_ms = time.time_ns() // 1_000_000
    return LimitSubject.of(f"req_{name}_{tenant_id}", principal, MODEL, "interactive", now_ms=now_ms)


def _ending(tenant_id: str, number: int, now_ms: int) -> Posting:
    return Posting(
        kind="settle",
        request_id=f"req_old{number}_{tenant_id}",
        outcome="ok",
        tenant_id=tenant_id,
        key_id=f"key_{tenant_id}",
        model=MODEL,
        root=ROOT,
        tier="interactive",
        price_version=PRICE,
        currency=CURRENCY,
        opened_at_ms=now_ms - 5_000,
        ended_at_ms=now_ms,
        usage=Usage(0, 64, 8, 50),
        charge=Charge(100, 0, 40, 10, 50),
        reserved=1000,
    )


async def fill(database: Database, tenants: Sequence[str]) -> None:
    now_ms = time.time_ns() // 1_000_000
    for start in range(0, len(tenants), CHUNK):
        some = tenants[start : start + CHUNK]
        rows = [
            {n: getattr(budget, n) for n in Budget.__struct_fields__ if n != "adjustments"}
            for tenant_id in some
            for budget in budgets_of(tenant_id)
        ]
        async with database.write() as conn:
            await conn.execute(insert(Tenant), [{"id": t, "name": t, "created_at": 1} for t in some])
            await conn.execute(insert(BudgetRow), rows)
            await request_postings.post(conn, 0, 1, [_ending(t, n, now_ms) for t in some for n in range(2)])


async def admit(limiter: Limiter, tenants: Sequence[str], name: str) -> list[float]:
    """One request of each tenant, `AT_ONCE` of them at a time; who is told to come again does. Seconds each waited."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(tenant_id: str) -> float:
        async with places:
            began = time.perf_counter()
            while True:
                try:
                    await limiter.reserve(holder(tenant_id, name), 100, 100, LADDER)
                    return time.perf_counter() - began
                except LimiterUnavailable:
                    await asyncio.sleep(AGAIN_S)

    return await asyncio.gather(*(one(tenant_id) for tenant_id in tenants))


async def measure(database: Database, redis_url: str, num_tenants: int) -> dict[str, Any]:
    async def nothing_to_ship() -> None:
        """All endings are in the ledger."""

    tenants = [f"proj_{number:08}" for number in range(num_tenants)]
    await fill(database, tenants)
    link = limiter_link(redis_url)
    limiter = Limiter(link, 0, database, caught_up=nothing_to_ship)
    await admit(limiter, tenants[::RUNNING_EVERY], "running")
    await link.command("FLUSHALL")
    began = time.perf_counter()
    waits = await admit(limiter, tenants, "new")
    took = time.perf_counter() - began
    await limiter.rebuilder.leave()
    await link.close()
    return {"num_tenants": num_tenants, "rebuild_s": round(took, 2), "target_s": 5, "wait_ms": percentiles(waits)}


async def run(postgres_url: str, redis_url: str, num_tenants: int) -> dict[str, Any]:
    database = Database(postgres_url)
    try:
        return await measure(database, redis_url, num_tenants)
    finally:
        await database.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--database-url",
        default=os.environ.get("HEADGATE_TEST_DATABASE_URL", "postgresql+psycopg://postgres@127.0.0.1:5432/postgres"),
    )
    parser.add_argument("--tenants", type=int, default=10_000)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        own_redis(Path(folder)) as redis,
        Postgres(arguments.database_url) as postgres,
    ):
        found = asyncio.run(run(postgres.url, redis, arguments.tenants))
    print(json.dumps({**found, "load": os.getloadavg()}))


if __name__ == "__main__":
    main()
