"""The requests: a table with a histogram of their times above it, and one request with its waterfall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from gateway.console import charts, pages
from gateway.console.tables import Column, Table
from gateway.console.viewer import Viewer

FILTERS = ("project_id", "api_key_id", "model", "status_class", "outcome", "start_time", "end_time", "min_duration_ms")
PAGE_ROWS = 100


async def list_requests(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    asked = {name: request.query[name] for name in (*FILTERS, "after") if request.query.get(name)}
    found = await viewer.get(_path(viewer), limit=PAGE_ROWS, **asked)
    rows = [_row(one) for one in found["data"]]
    following = {"after": found["last_id"]} if found["has_more"] else {}
    return pages.show(
        request,
        viewer,
        "requests.html",
        table=Table("requests", _columns(viewer), rows, _EMPTY, following),
        filters=[name for name in FILTERS if viewer.sees_all or name != "project_id"],
        chart=charts.volume([(row["started_at"], row["status"] >= 400) for row in rows]),
    )


async def show_request(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    found = await viewer.get(f"{_path(viewer)}/{request.match_info['id']}")
    return pages.show(
        request,
        viewer,
        "request.html",
        found=found,
        waterfall=charts.waterfall(found["timeline"]["phases"], found["duration_ms"]),
        curl=_curl(found),
    )


_EMPTY = "No request was found. Send one with an API key, or widen the filters."


def _path(viewer: Viewer) -> str:
    return "/admin/v1/requests" if viewer.sees_all else "/v1/requests"


def _columns(viewer: Viewer) -> Sequence[Column]:
    project = [Column("project_id", "Tenant", "code")] if viewer.sees_all else []
    return [
        Column("started_at", "Time", "moment"),
        Column("id", "Request", "code", link=lambda row: f"{pages.ROOT}/requests/{row['id']}"),
        *project,
        Column("model", "Model"),
        Column("status", "Status", "count"),
        Column("outcome", "Outcome"),
        Column("ttft_ms", "TTFT", "ms"),
        Column("duration_ms", "Duration", "ms"),
        Column("prompt_tokens", "Prompt", "count"),
        Column("cached_tokens", "Cached", "count"),
        Column("completion_tokens", "Output", "count"),
        Column("charge_micro_units", "Cost", "money", currency="currency"),
        Column("finish_reason", "Finish"),
        Column("num_retries", "Retries", "count"),
    ]


def _row(one: Mapping[str, Any]) -> dict[str, Any]:
    return {**one, **one["usage"], "started_at": one["created_at_ms"] / 1000}


def _curl(found: Mapping[str, Any]) -> str:
    """Returns a command that sends a request like this one. Its text is not known, so a greeting stands in for it."""
    body = f'{{"model": "{found["model"]}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    return f"curl $HEADGATE_URL{found['endpoint']} -H \"authorization: Bearer $HEADGATE_API_KEY\" -H 'content-type: application/json' -d '{body}'"


ROUTES = [pages.get("/requests", list_requests), pages.get("/requests/{id}", show_request)]
