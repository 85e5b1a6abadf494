"""Charges of the last days, for the console's pages of money."""

from __future__ import annotations

import secrets
import time

from gateways import MODEL, RunningGateway
from money import posting
from sqlalchemy import insert

from accounting.prices import prices, pricing
from accounting.requests import request_postings
from accounting.tables.residency_models import ResidencyCharge
from accounting.values.types import Tier, Usage
from gateway.base.app_keys import DATABASE

KEPT_CHARGE = 5_000_000
USAGE = Usage(6_000_000, 1_000_000, 2_000_000, 500_000)
DAY_S = 86_400
VERSION = "standard@1"


async def spend(
    gateway: RunningGateway,
    tenant_id: str,
    days_ago: int = 0,
    tier: Tier = "interactive",
    key_id: str = "key_x",
    currency: str = "USD",
) -> int:
    """Posts one request and returns its charge in micro-units. A request of today began this second."""
    opened_ms = int(time.time() - days_ago * DAY_S) * 1000
    async with gateway.app[DATABASE].write() as conn:
        rates = await prices.rates_of(conn, VERSION, MODEL, tier)
        assert rates is not None
        charge = pricing.charge(USAGE, rates)
        made = posting(
            f"req_{opened_ms:012x}{secrets.token_hex(10)}",
            USAGE,
            tenant_id=tenant_id,
            key_id=key_id,
            model=MODEL,
            tier=tier,
            price_version=VERSION,
            opened_at_ms=opened_ms,
            ended_at_ms=opened_ms + 900,
            charge=charge,
            currency=currency,
        )
        await request_postings.post(conn, 7, 1, [made])
    return charge.total


async def keep_kv(gateway: RunningGateway, tenant_id: str) -> None:
    """Charges the tenant `KEPT_CHARGE` micro-units for KV that was kept in this hour."""
    hour = int(time.time()) // 3600 * 3600
    row = {
        "request_id": f"residency:{tenant_id}:{MODEL}:{hour}",
        "attempt": 1,
        "tenant_id": tenant_id,
        "model": MODEL,
        "hour": hour,
        "price_version": VERSION,
        "currency": "USD",
        "cache": 1,
        "pinned": 0,
        "charge_cache": KEPT_CHARGE,
        "charge_pinned": 0,
        "posted_at_ms": hour * 1000,
    }
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(insert(ResidencyCharge).values(**row))
