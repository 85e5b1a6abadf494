"""Charges of the last days, for the console's pages of money."""

from __future__ import annotations

import secrets
import time

from gateways import MODEL, RunningGateway
from money import posting

from accounting.prices import prices, pricing
from accounting.requests import request_postings
from accounting.values.types import Tier, Usage
from gateway.base.app_keys import DATABASE

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
