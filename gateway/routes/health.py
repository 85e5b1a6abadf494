"""Probes. They tell what is missing, by fixed names and the served models' ids; nothing of a tenant."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.base.app_keys import LIFECYCLE
from gateway.base.checks import Report
from gateway.http.route_table import Route


async def livez(request: web.Request) -> web.Response:
    """The loop answers; no dependency is asked."""
    return web.json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """503: no request would be served. What is asked of others is asked beforehand, whoever probes how often."""
    return as_response(request.app[LIFECYCLE].report())


def as_response(report: Report, **more: object) -> web.Response:
    body = {**msgspec.to_builtins(report), **more}
    return web.json_response(body, status=200 if report.takes_traffic else 503)


ROUTES = [
    Route("GET", "/livez", livez, "none"),
    Route("GET", "/readyz", readyz, "none"),
    Route("GET", "/health", readyz, "none"),
]
