"""The object of `/v1/usage/summary`. The module holds shapes only; times are Unix seconds, amounts micro-units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from accounting.billing.forecasts import Forecast
from accounting.billing.summaries import Prompts, Spender
from accounting.limits.caps import Cap
from accounting.requests.failures import Failures

METHOD = (
    "What was spent this month, and the mean of the last {num_days} whole days for the time that is left. The band prices"
    " that time by the day at the 10th and at the 90th percentile."
)


class Spending(msgspec.Struct, frozen=True):
    """The spending in one currency."""

    currency: str
    today: int
    month: int
    days: Sequence[tuple[int, int]]
    """The first second of each day and its amount, oldest first."""
    forecast: Forecast | None


def summary(
    *,
    now_ms: int,
    period: str,
    spending: Sequence[Spending],
    prompts: Mapping[str, Prompts],
    failures: Failures,
    caps: Sequence[Cap],
    tenants: Sequence[Spender] | None,
) -> dict[str, Any]:
    """Returns the summary. `tenants` is None where one tenant asks."""
    shown = {
        "object": "usage.summary",
        "as_of": now_ms // 1000,
        "period": period,
        "spending": [_spending(one) for one in spending],
        "prompts": [_prompts(currency, one) for currency, one in prompts.items()],
        "failures": _failures(failures),
        "caps": [_cap(cap, now_ms) for cap in caps],
    }
    return shown if tenants is None else shown | {"top_tenants": [_spender(one) for one in tenants]}


def _spending(one: Spending) -> dict[str, Any]:
    return {
        "currency": one.currency,
        "today_micro_units": one.today,
        "month_micro_units": one.month,
        "forecast": None if one.forecast is None else _forecast(one.forecast),
        "days": [{"start_time": start, "amount_micro_units": amount} for start, amount in one.days],
    }


def _forecast(found: Forecast) -> dict[str, Any]:
    return {
        "expected_micro_units": found.expected,
        "low_micro_units": found.low,
        "high_micro_units": found.high,
        "num_days": found.num_days,
        "method": METHOD.format(num_days=found.num_days),
    }


def _prompts(currency: str, one: Prompts) -> dict[str, Any]:
    return {
        "currency": currency,
        "num_requests": one.num_requests,
        "input_tokens": one.num_tokens,
        "input_cached_tokens": one.num_cached,
        "saved_micro_units": one.saved,
    }


def _failures(found: Failures) -> dict[str, Any]:
    return {
        "since": found.since_ms // 1000,
        "num_requests": found.num_requests,
        "num_failed": found.num_failed,
        "causes": [
            {
                "status": cause.status,
                "outcome": cause.outcome,
                "error_code": cause.error_code or None,
                "num_requests": cause.num_requests,
            }
            for cause in found.causes
        ],
    }


def _cap(cap: Cap, now_ms: int) -> dict[str, Any]:
    reached_at_ms = cap.reached_at_ms(now_ms)
    return {
        "budget": cap.budget_id,
        "project_id": cap.tenant_id,
        "api_key_id": cap.key_id,
        "model": cap.model,
        "tier": cap.tier,
        "period": cap.kind,
        "start": cap.period.start_ms // 1000,
        "end": cap.period.end_ms // 1000,
        "limit_micro_units": cap.limit,
        "used_micro_units": cap.used,
        "currency": cap.currency,
        "reached_at": None if reached_at_ms is None else reached_at_ms // 1000,
    }


def _spender(one: Spender) -> dict[str, Any]:
    return {
        "project_id": one.tenant_id,
        "project_name": one.name,
        "currency": one.currency,
        "num_requests": one.num_requests,
        "month_micro_units": one.charge,
    }
