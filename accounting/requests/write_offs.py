"""Write-offs: tokens that the engine computed and no tenant pays, which is the difference between its records and the
ending. The module is pure.

For each request and token class: billed + written off = sum over the engine's records, in whatever order they come.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from accounting.ledger.legs import CHARGES, COUNTED
from accounting.values.types import TOKEN_CLASSES, LedgerRow


def rows(
    ending: LedgerRow,
    records: Sequence[LedgerRow],
    earlier: Sequence[LedgerRow],
    new_records: Collection[tuple[str, int]],
    now_ms: int,
) -> list[dict[str, Any]]:
    """Returns write-off rows for those of `records` that are in `new_records`. `earlier` has the request's present
    write-offs."""
    if not earlier and len(records) == 1 and _is_paid(records[0], ending):
        return []
    not_covered = _not_covered(ending, records, earlier, new_records)
    made = []
    for record in sorted(records, key=lambda r: r["attempt"]):
        if (record["request_id"], record["attempt"]) not in new_records:
            continue
        surplus: dict[str, int] = {}
        for name in TOKEN_CLASSES:
            covered = min(record[name], not_covered[name])
            not_covered[name] -= covered
            surplus[name] = record[name] - covered
        made += [
            _row(ending, record, ending["write_off"], surplus, now_ms),
            _row(ending, record, "speculation", {"speculated": record["speculated"]}, now_ms),
            _row(ending, record, "recompute", {"recomputed": record["recomputed"]}, now_ms),
        ]
    return [row for row in made if row is not None]


def taken_over(entry: LedgerRow, reason: str, now_ms: int) -> dict[str, Any]:
    """Returns the write-off that follows a reversal: the tokens that the tenant had been charged for."""
    return {
        **entry,
        "kind": reason,
        "write_off": reason,
        "posted_at_ms": now_ms,
        **dict.fromkeys((*CHARGES, "reserved"), 0),
    }


def _is_paid(record: LedgerRow, ending: LedgerRow) -> bool:
    """Returns whether the ending covers all of the record. This is so for nearly every request."""
    if record["speculated"] or record["recomputed"]:
        return False
    return all(record[name] <= ending[name] for name in TOKEN_CLASSES)


def _not_covered(
    ending: LedgerRow,
    records: Sequence[LedgerRow],
    earlier: Sequence[LedgerRow],
    new_records: Collection[tuple[str, int]],
) -> dict[str, int]:
    """Returns the billed tokens that no earlier record covers. They are never negative, as a record covers at most its
    own count."""
    met = [r for r in records if (r["request_id"], r["attempt"]) not in new_records]
    return {name: ending[name] - (sum(r[name] for r in met) - sum(w[name] for w in earlier)) for name in TOKEN_CLASSES}


def _row(
    ending: LedgerRow, record: LedgerRow, reason: str, tokens: Mapping[str, int], now_ms: int
) -> dict[str, Any] | None:
    if not any(tokens.values()):
        return None
    return {
        **ending,
        "kind": reason,
        "write_off": reason,
        "attempt": record["attempt"],
        "posted_at_ms": now_ms,
        **dict.fromkeys((*CHARGES, "reserved"), 0),
        **{name: tokens.get(name, 0) for name in COUNTED},
    }
