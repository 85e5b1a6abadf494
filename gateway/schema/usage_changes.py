"""Parameters and object of `/v1/usage/changes` and `/admin/v1/usage/changes`. The module holds shapes only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from accounting.comparison import period_sums
from accounting.comparison.causes import Change, ModelChange, Part, Period
from accounting.comparison.period_sums import Interval, Intervals, KeyCharges, Periods
from accounting.values.types import TOKEN_CLASSES, Usage
from gateway.base import errors
from gateway.schema import query
from gateway.schema.query import Query

TIMES = ("start_time", "end_time", "before_start_time", "before_end_time")


class Asked(msgspec.Struct, frozen=True):
    tenant_id: str
    intervals: Intervals
    key_id: str | None
    model: str | None


def asked_of(asked: Query, tenant_id: str | None, now: int) -> Asked:
    """Reads the parameters. With `tenant_id` they are about that tenant, whatever is asked. Raises `ApiError` 400, and
    InvalidError for periods that cannot be.
    """
    query.refuse_unknown(asked, (*TIMES, "project_id", "api_key_id", "model"))
    tenant_id = query.text(asked, "project_id") if tenant_id is None else tenant_id
    start, end, before_start, before_end = (query.integer(asked, name) for name in TIMES)
    for name, value in (("project_id", tenant_id), ("start_time", start)):
        if value is None:
            raise errors.invalid(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    assert tenant_id is not None
    assert start is not None
    intervals = period_sums.intervals(start, end, before_start, before_end, now)
    return Asked(tenant_id, intervals, query.text(asked, "api_key_id"), query.text(asked, "model"))


def change(asked: Asked, periods: Periods, found: Change) -> dict[str, Any]:
    return {
        "object": "usage.changes",
        "project_id": asked.tenant_id,
        "api_key_id": asked.key_id,
        "model": asked.model,
        "currency": periods.currency.lower(),
        "before": _period(asked.intervals.before, periods.before),
        "after": _period(asked.intervals.after, periods.after),
        "difference_micro_units": found.after - found.before,
        "first_cause": found.first_cause,
        "parts": _parts(found.parts),
        "models": [_of_model(one) for one in found.models],
        "api_keys": [_of_key(one) for one in periods.keys],
    }


def _period(interval: Interval, period: Period) -> dict[str, Any]:
    lines = period.lines
    usage = Usage(*(sum(getattr(line.usage, name) for line in lines) for name in TOKEN_CLASSES))
    return {
        "start_time": interval.start,
        "end_time": interval.end,
        "charge_micro_units": period.charge,
        "residency_micro_units": sum(period.residency.values()),
        "corrections_micro_units": period.corrections,
        "num_model_requests": sum(line.num_requests for line in lines),
        "num_batch_requests": sum(line.num_requests for line in lines if line.tier == "batch"),
        "input_tokens": usage.prompt,
        "input_cached_tokens": usage.cache_read,
        "input_cache_write_tokens": usage.cache_write,
        "input_uncached_tokens": usage.uncached,
        "output_tokens": usage.output,
    }


def _parts(parts: Sequence[Part]) -> list[dict[str, Any]]:
    return [{"cause": part.cause, "amount_micro_units": part.amount} for part in parts]


def _of_model(one: ModelChange) -> dict[str, Any]:
    return {"model": one.model, **_charges(one.before, one.after), "parts": _parts(one.parts)}


def _of_key(one: KeyCharges) -> dict[str, Any]:
    return {"api_key_id": one.key_id, **_charges(one.before, one.after)}


def _charges(before: int, after: int) -> dict[str, int]:
    return {"before_micro_units": before, "after_micro_units": after, "difference_micro_units": after - before}
