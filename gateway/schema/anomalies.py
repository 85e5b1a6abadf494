"""An anomaly: a key or an end user, and the amounts of its worst hour or its day beside the usual ones. The module
holds shapes only.
"""

from __future__ import annotations

from typing import Any

from accounting.anomalies.anomalies import Anomaly
from accounting.anomalies.bands import Band
from accounting.anomalies.end_users import EndUserAnomaly
from accounting.anomalies.findings import HOUR_S


def anomaly(one: Anomaly) -> dict[str, Any]:
    """Returns an anomaly. `usual` is the median of the same hours of the days before, `upper` the most that is usual."""
    found = one.finding
    return {
        "id": f"anomaly_{found.hours[0]:x}_{one.key_id}",
        "object": "anomaly",
        "project_id": one.tenant_id,
        "project_name": one.tenant_name,
        "project_status": one.tenant_status,
        "api_key_id": one.key_id,
        "api_key_name": one.key_name,
        "api_key_works": one.key_works,
        "suspicion": found.suspicion,
        "signals": list(found.signals),
        "start_time": found.hours[0],
        "end_time": found.hours[-1] + HOUR_S,
        "num_hours": len(found.hours),
        "peak_time": found.peak,
        "requests": _amounts(found.observed.num_requests, found.requests),
        "charge_micro_units": _amounts(found.observed.charge, found.charge),
        "currency": one.currency,
        "new_models": list(one.new_models),
        "cause": found.cause,
    }


def of_end_user(one: EndUserAnomaly) -> dict[str, Any]:
    """Returns an anomaly of an end user's present day."""
    return {
        "object": "end_user_anomaly",
        "project_id": one.tenant_id,
        "end_user": one.end_user,
        "start_time": one.day_ms // 1000,
        "requests": _amounts(one.num_requests, one.requests),
        "charge_micro_units": _amounts(one.charge, one.charges),
        "currency": one.currency,
    }


def _amounts(observed: int, usual: Band) -> dict[str, int]:
    return {"observed": observed, "usual": usual.usual, "upper": usual.upper}
