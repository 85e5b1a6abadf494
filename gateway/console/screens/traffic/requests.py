"""The requests: filters, a histogram of the whole filtered period, and a page of rows."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from aiohttp import web

from gateway.base import errors
from gateway.base.checks import MODEL
from gateway.console import charts, choices, pages
from gateway.console.calls import Refused
from gateway.console.tables import Column, Table, money_column, next_page
from gateway.console.viewer import Viewer

FILTERS = (
    "project_id",
    "api_key_id",
    "model",
    "status_class",
    "outcome",
    "error_code",
    "service_tier",
    "batch_id",
    "end_user",
    "min_duration_ms",
    "trace_id",
    "request_id",
)
"""The filters that the API takes as they are."""
TIMES = {"from": "start_time", "until": "end_time"}
OUTCOMES = {
    "ok": "answered",
    "client_error": "client's error",
    "refused": "refused by a limit",
    "server_error": "server's error",
    "client_gone": "client left",
}
STATUS_CLASSES = ("2xx", "4xx", "5xx")
TIERS = ("default", "batch")
PAGE_ROWS = 100
PERIOD_S = 24 * 3600
"""The period of the histogram where no start is asked for."""
_EMPTY = "No request was found. Send one with an API key, or widen the filters."


async def list_requests(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    tenants = await choices.tenants(viewer)
    columns = choices.columns_for(viewer, COLUMNS)
    table, chart, message = Table("requests", columns, [], _EMPTY), None, ""
    try:
        asked = _asked(request)
        found = await viewer.listed(viewer.own("requests"), PAGE_ROWS, **asked)
        rows = await choices.named(viewer, map(row_of, found["data"]))
        table = Table("requests", columns, rows, _EMPTY, next_page(found))
        chart = None if request.query.get("format") else await _volume(viewer, asked)
    except (Refused, errors.ApiError) as refusal:
        if refusal.status != 400 or request.query.get("format"):
            raise
        message = refusal.message
    return pages.show(
        request,
        viewer,
        "requests.html",
        table=table,
        chart=chart,
        message=message,
        status=400 if message else 200,
        tenants=tenants,
        models=await models_of(viewer),
        outcomes=OUTCOMES,
        status_classes=STATUS_CLASSES,
        tiers=TIERS,
    )


COLUMNS: Sequence[Column] = (
    Column("started_at", "Time", "moment"),
    Column("id", "Request", "code", link=lambda row: f"{pages.ROOT}/requests/{row['id']}"),
    choices.TENANT,
    Column("model", "Model"),
    Column("status", "Status", "count"),
    Column("outcome", "Outcome", "state"),
    Column("prompt_tokens", "Prompt", "count"),
    Column("cached_tokens", "Cached", "count"),
    Column("completion_tokens", "Output", "count"),
    money_column("charge_micro_units", "Cost"),
    Column("ttft_ms", "TTFT", "ms"),
    Column("duration_ms", "Duration", "ms"),
    Column("finish_reason", "Finish"),
    Column("num_retries", "Retries", "count"),
    choices.TENANT_ID,
)


def row_of(one: Mapping[str, Any]) -> dict[str, Any]:
    row = {**one, **one["usage"], "started_at": one["created_at_ms"] / 1000}
    return row if was_computed(one) else row | {"cached_tokens": None}


def was_computed(one: Mapping[str, Any]) -> bool:
    """Returns whether the row's tokens were computed. Those of a request that was refused, or failed before it cost
    anything, were counted at most."""
    return bool(one["status"] < 400 or one["charge_micro_units"])


async def models_of(viewer: Viewer) -> Sequence[str]:
    """Returns the models that the viewer can choose from."""
    if not viewer.sees_all:
        return [model["id"] for model in (await viewer.get("/v1/models"))["data"]]
    # The operator's key sends no requests, so it has no list of models. The probe names every model that is served.
    answer = await viewer.forward("GET", "/readyz")
    checks = json.loads(answer.text or "{}").get("checks", []) if isinstance(answer, web.Response) else []
    return [check["name"].removeprefix(MODEL) for check in checks if check["name"].startswith(MODEL)]


async def _volume(viewer: Viewer, asked: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the histogram and its period. None where a filter names requests one by one."""
    if "request_id" in asked or "trace_id" in asked:
        return None
    end = asked.get("end_time", int(time.time()) + 1)
    period = {"start_time": end - PERIOD_S, **asked, "end_time": end}
    found = await viewer.get(f"{viewer.own('requests')}/volume", num_buckets=charts.NUM_BARS, **period)
    return {
        "bars": charts.counted(found["data"]),
        "start": period["start_time"],
        "end": end,
        "counted_from": found["counted_from_ms"] / 1000,
    }


def _asked(request: web.Request) -> dict[str, Any]:
    """Returns the filters of the page's address as the API takes them. Raises `ApiError` 400."""
    asked: dict[str, Any] = choices.asked(request, FILTERS)
    for name, parameter in TIMES.items():
        if value := request.query.get(name):
            asked[parameter] = _seconds(name, value)
    return asked


def _seconds(name: str, value: str) -> int:
    """Reads what a `datetime-local` input sends as UTC."""
    try:
        return max(0, int(datetime.fromisoformat(value).replace(tzinfo=UTC).timestamp()))
    except ValueError:
        raise errors.invalid(f"'{name}' must be a date and a time like 2026-11-23T19:00.", name) from None


ROUTES = [pages.get("/requests", list_requests)]
