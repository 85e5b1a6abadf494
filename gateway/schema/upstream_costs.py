"""The bodies and objects of an upstream's costs: rows of a bill, and the days that its cost API tells. The module
holds shapes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

from msgspec import Meta

from accounting.upstreams.cost_days import BilledLine, ComparedDay, DaySums
from accounting.upstreams.cost_pulls import Pull
from accounting.upstreams.costs import CostRow, CostSums
from accounting.values.periods import LAST_SECOND, date_of
from gateway.schema.convert import OwnBody

MAX_ROWS = 10_000
Text = Annotated[str, Meta(min_length=1, max_length=256)]


class NewCostRow(OwnBody, frozen=True):
    id: Text
    amount_micro_units: Annotated[int, Meta(ge=-(2**53), le=2**53)]
    provider_id: Annotated[str, Meta(max_length=128)] = ""
    billed_at: Annotated[int, Meta(ge=0, le=LAST_SECOND)] = 0


class NewCosts(OwnBody, frozen=True):
    rows: Annotated[list[NewCostRow], Meta(min_length=1, max_length=MAX_ROWS)]

    def values(self) -> list[CostRow]:
        return [CostRow(row.id, row.provider_id, row.amount_micro_units, row.billed_at * 1000) for row in self.rows]


def bill(found: CostSums) -> dict[str, Any]:
    return {
        "billed_micro_units": found.billed,
        "matched_micro_units": found.matched,
        "drift_micro_units": dict(found.drift),
        "unbilled_micro_units": found.unbilled,
        "num_unbilled": found.num_unbilled,
    }


def days(
    name: str, currency: str, state: Pull, compared: Sequence[ComparedDay], sums: DaySums, *, is_declared: bool
) -> dict[str, Any]:
    """Shows the days as they were compared, the newest first. `is_declared` says that costs are read."""
    return {
        "id": name,
        "object": "upstream.cost_days",
        "currency": currency,
        "is_read": is_declared,
        "pulled_at": state.pulled_at_ms // 1000 or None,
        "tried_at": state.tried_at_ms // 1000 or None,
        "fault": state.fault or None,
        "days": [_day(one) for one in reversed(compared)],
        "totals": {
            "billed_micro_units": sums.billed,
            "credit_micro_units": sums.credit,
            "expected_micro_units": sums.expected,
            "matched_micro_units": sums.matched,
            "drift_micro_units": dict(sums.drift),
            "other_currencies_micro_units": dict(sums.others),
        },
    }


def _day(one: ComparedDay) -> dict[str, Any]:
    facts = one.facts
    return {
        "date": date_of(facts.day),
        "billed_micro_units": facts.billed,
        "credit_micro_units": facts.credit,
        "expected_micro_units": facts.expected,
        "matched_micro_units": one.matched,
        "drift_micro_units": one.drift,
        "account": one.account or None,
        "other_currencies_micro_units": dict(facts.others),
        "num_calls": facts.num_calls,
        "num_unsure": facts.num_unsure,
        "num_corrections": facts.num_corrections,
    }


def lines(name: str, day: int, found: Sequence[BilledLine]) -> dict[str, Any]:
    """Shows all that the provider has said about a day. Of a line, the last revision is in force."""
    last = {(one.line_item, one.currency): one.revision for one in found}
    return {
        "id": name,
        "object": "upstream.cost_lines",
        "date": date_of(day),
        "lines": [
            {
                "line_item": one.line_item,
                "currency": one.currency,
                "amount_micro_units": one.amount,
                "revision": one.revision,
                "is_in_force": last[one.line_item, one.currency] == one.revision,
                "pulled_at": one.pulled_at_ms // 1000,
            }
            for one in found
        ],
    }


def day_of(date: str) -> int | None:
    """Returns the first second of a date like 2026-10-31; None for what is none."""
    try:
        second = int(datetime.strptime(date, "%Y-%m-%d").replace(tzinfo=UTC).timestamp())
    except ValueError:
        return None
    return second if second >= 0 and date_of(second) == date else None
