"""Double entry: an entry's tokens and money as balanced legs. The module is pure. Debits are positive, credits
negative."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accounting.values.types import TOKEN_CLASSES, LedgerRow

TOKENS = "tokens"
COUNTED = (*TOKEN_CLASSES, "speculated", "recomputed")
"""All tokens that an engine computes. The last two are always written off."""


CHARGES = ("charge", *(f"charge_{name}" for name in TOKEN_CLASSES))


def reversal(entry: LedgerRow, reason: str, now_ms: int) -> dict[str, Any]:
    """Returns the entry that cancels a settle."""
    return {
        **entry,
        "kind": "reversal",
        "write_off": reason,
        "posted_at_ms": now_ms,
        "reserved": 0,
        **{name: -entry[name] for name in (*COUNTED, *CHARGES)},
    }


@dataclass(frozen=True)
class Rule:
    """One leg of every entry in which `column` is not 0."""

    account: str | None
    """The account of the leg. None stands for the account that takes the tokens (`TAKERS`)."""
    unit: str | None
    """The unit of the leg. None stands for the entry's currency."""
    token_class: str
    column: str
    sign: int


RULES = (
    *(Rule(None, TOKENS, name, name, 1) for name in COUNTED),
    *(Rule("engine_production", TOKENS, name, name, -1) for name in COUNTED),
    Rule("tenant_receivable", None, "", "charge", 1),
    *(Rule("revenue", None, name, f"charge_{name}", -1) for name in TOKEN_CLASSES),
)
"""The legs of all entries. A settle: the tenant uses the tokens that the engine produced and owes the revenue. A
reversal has all numbers negative and takes that back. A write-off is the operator's loss. A void has no legs.
Corrections have charges below 0, so the revenue goes back to the tenant's debt."""
TAKERS = "tenant_usage", "write_off"
"""The account that takes the tokens of billed entries, and that of all other entries."""


def transfer(entry: LedgerRow, debit: str, credit: str, amount: int) -> list[dict[str, Any]]:
    """Returns the legs of money that goes from one account to another."""
    unit = entry["currency"]
    return [_leg(entry, debit, unit, "", amount), _leg(entry, credit, unit, "", -amount)]


def _leg(entry: LedgerRow, account: str, unit: str, token_class: str, amount: int) -> dict[str, Any]:
    return {
        "request_id": entry["request_id"],
        "kind": entry["kind"],
        "attempt": entry["attempt"],
        "account": account,
        "unit": unit,
        "token_class": token_class,
        "amount": amount,
    }
