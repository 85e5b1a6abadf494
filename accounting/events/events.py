"""Events for the outside, made from rows: CloudEvents 1.0. The module is pure.

`id` is unique in an installation and the same for the same fact, so a receiver recognises a repeated event. Events hold
ids, counts, money and times, but neither content nor secrets.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal, get_args

import msgspec

from accounting.values.currencies import places, unit, written
from accounting.values.types import TOKEN_CLASSES

EventType = Literal[
    "headgate.usage.v1",
    "headgate.budget.alert.v1",
    "headgate.spend_alert.v1",
    "headgate.invoice.closed.v1",
    "headgate.api_key.rotated.v1",
    "headgate.api_key.revoked.v1",
    "headgate.batch.ended.v1",
    "headgate.webhook.test.v1",
]
TEST: EventType = "headgate.webhook.test.v1"
TYPES: tuple[EventType, ...] = get_args(EventType)
"""All types. A test event goes to its webhook whatever types that one listens to."""


class Event(msgspec.Struct, frozen=True):
    id: str
    type: EventType
    tenant_id: str
    at_ms: int
    data: dict[str, Any]


def usage(entry: Mapping[Any, Any]) -> Event:
    """Returns the event of a settle, or of the reversal that takes it back with all numbers negative."""
    names = ("request_id", "kind", "key_id", "model", "tier", "price_version", "currency", "batch_id", "line_no")
    return Event(
        f"{entry['request_id']}/{entry['kind']}/{entry['attempt']}",
        "headgate.usage.v1",
        entry["tenant_id"],
        entry["posted_at_ms"],
        {name: entry[name] for name in (*names, *TOKEN_CLASSES)}
        | {
            "charge_micro_units": entry["charge"],
            "opened_at_ms": entry["opened_at_ms"],
            "ended_at_ms": entry["ended_at_ms"],
        },
    )


def budget_alert(row: Mapping[Any, Any], currency: str) -> Event:
    names = ("budget_id", "period_start_ms", "threshold", "used_micro_units", "limit_micro_units")
    return Event(
        f"{row['budget_id']}/{row['period_start_ms']}/{row['threshold']}",
        "headgate.budget.alert.v1",
        row["tenant_id"],
        row["at_ms"],
        {name: row[name] for name in names} | {"currency": currency},
    )


def spend_alert(
    alert_id: str, tenant_id: str, amounts: tuple[int, int], currency: str, start_ms: int, at_ms: int
) -> Event:
    """Returns the event of a spend alert. `amounts` are its threshold and what is spent, in micro-units.
    `threshold_amount` is in the smallest unit of the currency, as in the API."""
    threshold, spent = amounts
    data = {
        "spend_alert_id": alert_id,
        "period_start_ms": start_ms,
        "threshold_amount": threshold // unit(places(currency)),
        "amount": written(threshold, currency),
        "currency": currency,
        "spent_micro_units": spent,
    }
    return Event(f"{alert_id}/{start_ms}", "headgate.spend_alert.v1", tenant_id, at_ms, data)


def invoice_closed(
    number: str, tenant_id: str, period: str, currency: str, amounts: tuple[int, int], at_ms: int
) -> Event:
    """Returns the event of a new invoice. `amounts` are its exact total and what is due, in micro-units."""
    total, due = amounts
    asked = {"total_micro_units": total, "due_micro_units": due}
    data = {"number": number, "period": period, "currency": currency, **asked}
    return Event(f"invoice/{number}", "headgate.invoice.closed.v1", tenant_id, at_ms, data)


def api_key(
    verb: Literal["rotated", "revoked"], tenant_id: str, key_id: str, version: int, now: int, **data: Any
) -> Event:
    """Returns the event of a key. `version` is that of the change. The event names the key only by its id."""
    type_: EventType = "headgate.api_key.rotated.v1" if verb == "rotated" else "headgate.api_key.revoked.v1"
    return Event(f"{key_id}/{version}", type_, tenant_id, now * 1000, {"api_key_id": key_id, **data})


def batch_ended(
    batch_id: str, tenant_id: str, status: str, counts: Mapping[str, int], files: Mapping[str, str | None], at_ms: int
) -> Event:
    data = {"batch_id": batch_id, "status": status, "request_counts": dict(counts), **files}
    return Event(batch_id, "headgate.batch.ended.v1", tenant_id, at_ms, data)


def body(event: Event, source: str) -> str:
    """Returns the event as CloudEvents' structured JSON."""
    when = datetime.fromtimestamp(event.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    value = {
        "specversion": "1.0",
        "id": event.id,
        "source": source,
        "type": event.type,
        "subject": event.tenant_id,
        "time": when.replace("+00:00", "Z"),
        "datacontenttype": "application/json",
        "data": event.data,
    }
    return msgspec.json.encode(value).decode()
