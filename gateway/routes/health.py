"""Probes. They name what is missing, by fixed names and the served models' ids; they show nothing of a tenant."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.base.app_keys import LIFECYCLE
from gateway.base.checks import Report
from gateway.http.route_table import Route


async def livez(request: web.Request) -> web.Response:
    """Reports that the loop answers; no dependency is checked."""
    return web.json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    """Reports whether requests would be served; 503 means that none would.

    Dependencies are checked in the background, so frequent probes cost them nothing.
    """
    return as_response(request.app[LIFECYCLE].report())


def as_response(report: Report, **more: object) -> web.Response:
    body = {**msgspec.to_builtins(report), **more}
    return web.json_response(body, status=200 if report.takes_traffic else 503)


ROUTES = [
    Route("GET", "/livez", livez, "none"),
    Route("GET", "/readyz", readyz, "none"),
    Route("GET", "/health", readyz, "none"),
]
