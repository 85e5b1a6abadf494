"""Sums of requests by end user or by a field of their metadata: what is asked, and the answer. The module holds
shapes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accounting.requests.label_usage import DAY_MS, METADATA, LabelDay, LabelFilter, LabelSum
from accounting.tables.request_models import END_USER
from accounting.values.periods import LAST_SECOND
from gateway.base import errors
from gateway.schema import query
from gateway.schema.query import Query

NUM_DAYS = 30
"""The days that are summed where no start is named."""
MAX_DAYS = 31
"""The days that one request sums: a tenant may have thousands of sums a day."""
NUM_VALUES_BY_DAY = 4
"""The values that have sums of their own by day; the others are one sum."""


def filter_of(asked: Query, tenant_id: str | None, now_ms: int) -> LabelFilter:
    """Reads which sums are asked for. With `tenant_id` only that tenant's are. Raises `ApiError` 400."""
    query.refuse_unknown(asked, ("project_id", "model", "start_time", "end_time", "label", "limit", "by_day"))
    label = query.text(asked, "label") or END_USER
    if label != END_USER and label.removeprefix(METADATA) in {label, ""}:
        raise errors.invalid(f"'label' must be '{END_USER}', or '{METADATA}' and the name of a field.", "label")
    until_ms = _milliseconds(asked, "end_time", now_ms + 1)
    since_ms = _milliseconds(asked, "start_time", max(0, until_ms - NUM_DAYS * DAY_MS))
    query.refuse_empty_span(since_ms, until_ms)
    if -(-until_ms // DAY_MS) - since_ms // DAY_MS > MAX_DAYS:
        raise errors.invalid(f"'start_time' and 'end_time' must be at most {MAX_DAYS} days apart.", "start_time")
    return LabelFilter(
        label=label,
        tenant_id=query.text(asked, "project_id") if tenant_id is None else tenant_id,
        model=query.text(asked, "model"),
        since_ms=since_ms,
        until_ms=until_ms,
    )


def sums(found: Sequence[LabelSum], labels: Sequence[str], days: Sequence[LabelDay] | None) -> dict[str, Any]:
    """Returns sums by the value of a label, the labels that the requests of these days have, and the sums of each day
    where they were asked for."""
    by_day = {} if days is None else {"days": [_day(one) for one in days]}
    return by_day | {
        "object": "list",
        "data": [
            {
                "object": "label_usage",
                "value": one.value or None,
                "project_id": one.tenant_id,
                "num_requests": one.num_requests,
                "usage": {
                    "prompt_tokens": one.prompt_tokens,
                    "cached_tokens": one.cached_tokens,
                    "completion_tokens": one.output_tokens,
                },
                "charge_micro_units": one.charge,
                "currency": one.currency,
            }
            for one in found
        ],
        "labels": list(labels),
    }


def largest(found: Sequence[LabelSum]) -> Sequence[str]:
    """Returns the values with the highest charge, which `by_day` tells one by one. What is beyond the bound of values is
    no value, and so is among the others."""
    return list(dict.fromkeys(one.value for one in found if one.value))[:NUM_VALUES_BY_DAY]


def _day(one: LabelDay) -> dict[str, Any]:
    return {
        "start_time": one.day_ms // 1000,
        "value": one.value or None,
        "num_requests": one.num_requests,
        "charge_micro_units": one.charge,
        "currency": one.currency,
    }


def _milliseconds(asked: Query, name: str, default: int) -> int:
    value = query.integer(asked, name)
    if value is None:
        return default
    if not 0 <= value <= LAST_SECOND:
        raise errors.invalid(f"'{name}' must be 0 to {LAST_SECOND}.", name)
    return value * 1000
