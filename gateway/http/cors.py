"""Requests of browsers' pages from other origins (CORS): pages of listed origins may call the API with a key of theirs.

It is off unless origins are listed. A preflight is answered without a key. The console takes no part in it, and no
answer allows credentials: a page of another origin never acts with the console's cookie.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from gateway.base.app_keys import SETTINGS
from gateway.limiter import limit_replies

METHODS = "GET, POST, PUT, PATCH, DELETE"
MAX_AGE_S = 600
MAX_HEADERS = 64
EXPOSED = ", ".join(
    (
        "x-request-id",
        "request-id",
        "x-client-request-id",
        "traceresponse",
        "openai-processing-ms",
        "retry-after",
        "retry-after-ms",
        "x-should-retry",
        "x-headgate-batch-status",
        "x-headgate-fallback",
        "x-headgate-ignored",
        "x-headgate-stop",
        "idempotent-replayed",
        *limit_replies.HEADERS,
    )
)
"""Headers of an answer that a page may read."""
_NAME = re.compile(r"[A-Za-z0-9-]{1,64}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers a preflight of a listed origin. Any other request goes on."""
    origin = _listed_origin(request)
    if (
        request.method != hdrs.METH_OPTIONS
        or origin is None
        or hdrs.ACCESS_CONTROL_REQUEST_METHOD not in request.headers
    ):
        return await handler(request)
    headers = {hdrs.ACCESS_CONTROL_ALLOW_METHODS: METHODS, hdrs.ACCESS_CONTROL_MAX_AGE: str(MAX_AGE_S)}
    asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "").split(",", MAX_HEADERS)[:MAX_HEADERS]
    names = [name for one in asked if _NAME.fullmatch(name := one.strip())]
    if names:
        headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = ", ".join(names)
    return web.Response(status=204, headers=headers)


def stamp_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Sets the headers with which a browser hands the answer to a page of a listed origin."""
    if not request.app[SETTINGS].cors_origins or _is_of_console(request):
        return
    response.headers.add(hdrs.VARY, hdrs.ORIGIN)
    if (origin := _listed_origin(request)) is not None:
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = EXPOSED


def _listed_origin(request: web.Request) -> str | None:
    origin = request.headers.get(hdrs.ORIGIN, "")
    return origin if origin in request.app[SETTINGS].cors_origins and not _is_of_console(request) else None


def _is_of_console(request: web.Request) -> bool:
    path = request.rel_url.path
    return path == "/console" or path.startswith("/console/")
