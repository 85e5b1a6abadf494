"""Double entry: an entry's tokens and money as balanced legs. Pure; debits are positive, credits negative."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from accounting.types import TOKEN_CLASSES

Row = Mapping[Any, Any]
"""A ledger entry or an engine record by column name: a row of SQL or one on its way there."""

TOKENS = "tokens"
COUNTED = (*TOKEN_CLASSES, "speculated", "recomputed")
"""Everything an engine computes; the last two are always written off."""


def legs(entry: Row) -> Iterator[dict[str, Any]]:
    """Settle: the tenant uses what the engine produced and owes the revenue. Write-off: our loss. Void: nothing."""
    taker = "tenant_usage" if entry["kind"] == "settle" else "write_off"
    for name in COUNTED:
        if entry[name]:
            yield _leg(entry, taker, TOKENS, name, entry[name])
            yield _leg(entry, "engine_production", TOKENS, name, -entry[name])
    if entry["charge"]:
        yield _leg(entry, "tenant_receivable", entry["currency"], "", entry["charge"])
    for name in TOKEN_CLASSES:
        if entry[f"charge_{name}"]:
            yield _leg(entry, "revenue", entry["currency"], name, -entry[f"charge_{name}"])


def _leg(entry: Row, account: str, unit: str, token_class: str, amount: int) -> dict[str, Any]:
    return {
        "request_id": entry["request_id"], "kind": entry["kind"], "attempt": entry["attempt"],
        "account": account, "unit": unit, "token_class": token_class, "amount": amount,
    }  # fmt: skip
