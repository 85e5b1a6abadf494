"""KV that a worker keeps for a tenant, from its blocks to the ledger."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from accounting.billing.residency import GRACE_MS, HOUR_S
from accounting.books import books
from accounting.prices import prices
from accounting.values.types import Rates
from gateway.base.app_keys import DATABASE
from gateway.books.bookkeeping import Bookkeeping
from tests.fakes import BYTES_PER_BLOCK
from tests.gateways import MODEL

PROMPT = "the water runs down to the field. " * 14
RATE, PINNED_RATE = 10**12, 3 * 10**11
"""So high that every byte-millisecond is worth something."""


@pytest.fixture
async def priced(gateway):
    rates = {(MODEL, "interactive"): Rates(1, 1, 1, 1)}
    async with gateway.app[DATABASE].write() as conn:
        await prices.create_sheet(conn, "kept", "USD", 1)
        await prices.add_version(conn, "kept", rates, 1, residency={MODEL: (RATE, PINNED_RATE)})


async def ask(gateway, key) -> None:
    async with gateway.session(key) as session:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1}
        answer = await session.post("/v1/completions", json=body)
        assert answer.status == 200, await answer.text()


@pytest.mark.rest
async def test_blocks_become_readings_and_readings_one_charge(gateway, worker, priced):
    anna, key = await gateway.new_tenant("anna")
    bert, _ = await gateway.new_tenant("bert")
    async with gateway.app[DATABASE].write() as conn:
        for tenant in (anna, bert):
            await prices.assign(conn, tenant, "kept", 1)
    await ask(gateway, key)
    kept = worker.engine.cache.usage(anna).num_blocks
    assert kept > 20

    async def told() -> bool:
        worker.service._tell_residency()
        return bool(await gateway.sql("SELECT 1 FROM residency_reading WHERE cache > 0"))

    for _ in range(100):
        if await told():
            break
        await asyncio.sleep(0.1)
    readings = await gateway.sql("SELECT * FROM residency_reading")
    assert {row.tenant_id for row in readings} <= {anna, "operator"}
    [mine] = [row for row in readings if row.tenant_id == anna]
    assert (mine.model, mine.process, mine.pinned) == (MODEL, worker.service._hello.process, 0)
    assert mine.cache % BYTES_PER_BLOCK == 0
    assert mine.cache >= kept * BYTES_PER_BLOCK

    later_ms = (mine.hour + HOUR_S) * 1000 + GRACE_MS
    keeper = Bookkeeping(gateway.app[DATABASE], CollectorRegistry(), closes=False)
    for _ in range(2):
        await keeper.once(later_ms)
    [charge] = await gateway.sql("SELECT * FROM residency_charge")
    exact = charge.cache * RATE
    assert abs(charge.charge_cache * 3_600_000 * 10**9 - exact) * 2 <= 3_600_000 * 10**9
    assert (charge.tenant_id, charge.price_version) == (anna, "kept@1")
    [entry] = await gateway.sql("SELECT * FROM ledger_entry WHERE kind = 'residency'")
    assert (entry.tenant_id, entry.charge, entry.opened_at_ms) == (anna, 0, mine.hour * 1000)
    async with gateway.app[DATABASE].read() as conn:
        report = await books.verify(conn)
    broken = {e.id: e.failures for e in report.equations if not e.ok}
    assert not {"I2", "I9", "I15"} & broken.keys(), broken
