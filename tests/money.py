"""Postings, engine records and rates for tests of the books."""

from __future__ import annotations

from typing import Any

from accounting.prices import pricing
from accounting.values.types import Posting, Rates, Usage, WitnessRecord

RATES = Rates(cache_read=10_000, cache_write=120_000, uncached=100_000, output=400_000)
NOON_MS = 1_700_049_600_000
"""2023-11-15T12:00:00Z"""


def posting(request_id: str, usage: Usage = Usage(16, 32, 5, 100), **changes: Any) -> Posting:  # noqa: B008 - frozen
    """A settle at `RATES`, or with `kind="void"` an ending that bills nothing."""
    void = changes.get("kind") == "void"
    billed = Usage() if void else usage
    fields: dict[str, Any] = {
        "kind": "settle",
        "request_id": request_id,
        "outcome": "ok",
        "tenant_id": "proj_a",
        "key_id": "key_a",
        "model": "m",
        "root": "r",
        "tier": "interactive",
        "price_version": "standard@1",
        "currency": "USD",
        "opened_at_ms": NOON_MS,
        "ended_at_ms": NOON_MS + 900,
        "usage": billed,
        "charge": pricing.charge(billed, RATES),
        "reserved": 10**9,
    }
    return Posting(**{**fields, **changes})


def record(request_id: str, usage: Usage = Usage(16, 32, 5, 100), **changes: Any) -> WitnessRecord:  # noqa: B008 - frozen
    fields: dict[str, Any] = {
        "worker": "w",
        "seq": 1,
        "request_id": request_id,
        "attempt": 0,
        "tenant_id": "proj_a",
        "root": "r",
        "usage": usage,
    }
    return WitnessRecord(**{**fields, **changes})
