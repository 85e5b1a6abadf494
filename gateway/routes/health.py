"""Probes and the drain door. Without tenant or model data, but for the operator's socket."""

from __future__ import annotations

from aiohttp import web

from gateway.keys import LIFECYCLE
from gateway.routes.table import Route


async def livez(request: web.Request) -> web.Response:
    """The loop answers; no dependency is asked."""
    return web.json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.Response:
    fault = request.app[LIFECYCLE].unready()
    return web.json_response({"status": fault or "ok"}, status=503 if fault else 200)


ROUTES = [
    Route("GET", "/livez", livez, "none"),
    Route("GET", "/readyz", readyz, "none"),
    Route("GET", "/health", readyz, "none"),
]
