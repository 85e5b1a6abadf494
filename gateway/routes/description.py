"""`GET /openapi.json`: the served routes, described by the table that serves them. It names no tenant and no model."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.http.route_table import ROUTES as TABLE
from gateway.http.route_table import Route
from gateway.schema import openapi

PATH = "/openapi.json"


async def describe(request: web.Request) -> web.Response:
    """Returns this description of the API, as OpenAPI 3.1."""
    table = [route for route in request.app[TABLE].values() if route.scope != "console"]
    text = msgspec.json.encode(openapi.document(table))
    return web.Response(body=text, content_type="application/json")


ROUTES = [Route("GET", PATH, describe, "none")]
