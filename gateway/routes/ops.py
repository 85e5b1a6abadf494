"""The operator's door of one gateway: a unix socket in a 0700 directory, never the base URL.

Probes with details, this process's own metrics page, and `POST /drain`.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from gateway.keys import LIFECYCLE
from gateway.routes import health
from gateway.telemetry.metrics import METRICS

MAIN = web.AppKey("main", web.Application)
DRAIN: web.AppKey[Callable[[], None]] = web.AppKey("drain")


async def readyz(request: web.Request) -> web.Response:
    """As on the base URL, and how many workers of each model are linked."""
    main = request.app[MAIN]
    fault = main[LIFECYCLE].unready()
    status = {"status": fault or "ok", "workers": main[LIFECYCLE].num_workers()}
    return web.json_response(status, status=503 if fault else 200)


async def metrics(request: web.Request) -> web.Response:
    page = request.app[MAIN][METRICS].page(request.headers.get("accept", ""))
    return web.Response(body=page.body, headers={"content-type": page.content_type})


async def drain(request: web.Request) -> web.Response:
    """As SIGTERM, without the exit: unready at once, nothing new after the grace."""
    request.app[DRAIN]()
    return web.json_response({"status": "draining"}, status=202)


def create_ops_app(main: web.Application, start_drain: Callable[[], None]) -> web.Application:
    app = web.Application()
    app[MAIN] = main
    app[LIFECYCLE] = main[LIFECYCLE]
    app[DRAIN] = start_drain
    app.router.add_get("/livez", health.livez)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    app.router.add_post("/drain", drain)
    return app
