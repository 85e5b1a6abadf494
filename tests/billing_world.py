"""A month of requests of many tenants, for tests and checks of billing."""

from __future__ import annotations

import random
from collections.abc import Iterator

from gateways import MODEL, RunningGateway
from money import posting

from accounting.access import api_keys
from accounting.database.db import Database
from accounting.prices import prices, pricing
from accounting.requests import request_postings
from accounting.tenants import tenants
from accounting.values.periods import bounds
from accounting.values.types import Posting, Rates, Usage, WitnessRecord
from gateway.base.app_keys import DATABASE

PERIOD = "2025-09"
START, END = bounds(PERIOD)
CLOSED_MS = (END + 49 * 3_600) * 1000
ODD = Rates(cache_read=33_333, cache_write=1_250_001, uncached=999_999, output=3_333_337)
BATCH = Rates(cache_read=11_111, cache_write=625_003, uncached=500_000, output=1_666_669)
CHEAP = Rates(cache_read=7, cache_write=13, uncached=11, output=17)
PEPPER = b"p" * 32
USAGE = Usage(1_000, 2_000, 3_000, 4_000)


async def tenants_with_keys(database: Database, count: int) -> list[tuple[str, str]]:
    """(tenant, key) of each; every third one has a sheet of its own from the middle of the month."""
    made = []
    async with database.write() as conn:
        await prices.create_sheet(conn, prices.DEFAULT_SHEET, "USD", 1)
        rates = {("m", "interactive"): ODD, ("m", "batch"): BATCH, ("n", "interactive"): CHEAP}
        await prices.add_version(conn, prices.DEFAULT_SHEET, rates, 1000)
        await prices.create_sheet(conn, "own", "USD", 1)
        await prices.add_version(conn, "own", dict.fromkeys(rates, CHEAP), 1000)
        for number in range(count):
            tenant = (await tenants.create(conn, f"tenant {number}", now=1)).id
            key = await api_keys.create(conn, PEPPER, tenant_id=tenant, now=1)
            made.append((tenant, key.info.id))
            if number % 3 == 0:
                await prices.assign(conn, tenant, "own", (START + 15 * 86_400) * 1000)
    return made


async def month_of_traffic(
    database: Database, owners: list[tuple[str, str]], per_tenant: int, seed: int = 1
) -> list[Posting]:
    """Posted with the engine's records, and the price that was in force at each one's start."""
    made = list(requests(owners, per_tenant, random.Random(seed)))
    priced = []
    async with database.read() as conn:
        for request in made:
            price = await prices.price_for(conn, request.tenant_id, request.model, request.tier, request.opened_at_ms)
            assert price is not None
            priced.append(_charged(request, price.version, price.rates))
    async with database.write() as conn:
        await request_postings.post(conn, 0, 1, priced, now_ms=END * 1000)
        await request_postings.post_engine_records(conn, [_witness(p) for p in priced], now_ms=END * 1000)
    return priced


def requests(owners: list[tuple[str, str]], per_tenant: int, chance: random.Random) -> Iterator[Posting]:
    for tenant, key in owners:
        for number in range(per_tenant):
            model, tier = chance.choice([("m", "interactive"), ("m", "batch"), ("n", "interactive")])
            usage = Usage(*(chance.randrange(5_000) for _ in range(4)))
            opened = chance.randrange(START * 1000, END * 1000)
            yield posting(
                f"req_{tenant}_{number:05d}",
                usage,
                tenant_id=tenant,
                key_id=key,
                model=model,
                tier=tier,
                opened_at_ms=opened,
                ended_at_ms=opened + 900,
            )


def _charged(request: Posting, version: str, rates: Rates) -> Posting:
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return Posting(**{**fields, "price_version": version, "charge": pricing.charge(request.usage, rates)})


def _witness(request: Posting) -> WitnessRecord:
    return WitnessRecord(
        worker="w",
        seq=1,
        request_id=request.request_id,
        attempt=0,
        tenant_id=request.tenant_id,
        root="r",
        usage=request.usage,
    )


async def used(gateway: RunningGateway, name: str = "=cmd|' /C calc'!A0 <b>") -> str:
    """A tenant with two requests in the month."""
    tenant, _ = await gateway.new_tenant(name)
    async with gateway.app[DATABASE].write() as conn:
        rates = await prices.rates_of(conn, "standard@1", MODEL, "interactive")
        await request_postings.post(
            conn,
            7,
            1,
            [
                posting(
                    f"req_{tenant}_{n}",
                    USAGE,
                    tenant_id=tenant,
                    model=MODEL,
                    opened_at_ms=(START + n * 86_400) * 1000,
                    charge=pricing.charge(USAGE, rates),
                    key_id="key_x",
                )
                for n in range(2)
            ],
        )
    return tenant
