"""Postings, engine records, rates and legs for tests of the books, and the equations that these satisfy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accounting.books import equations
from accounting.ledger.legs import RULES, TAKERS
from accounting.prices import pricing
from accounting.values.types import BILLED, LedgerRow, Posting, Rates, Usage, WitnessRecord

EQUATIONS = tuple(one for one in vars(equations).values() if isinstance(one, equations.Equation))
"""The equations of the code, in its order."""

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


def legs(entry: LedgerRow) -> Iterator[dict[str, Any]]:
    """The legs that the rules give an entry: the same that SQL makes by `booking.py`."""
    taker = TAKERS[entry["kind"] not in BILLED]
    for rule in RULES:
        if amount := entry[rule.column]:
            yield {
                **{name: entry[name] for name in ("request_id", "kind", "attempt")},
                "account": rule.account or taker,
                "unit": rule.unit or entry["currency"],
                "token_class": rule.token_class,
                "amount": rule.sign * amount,
            }
