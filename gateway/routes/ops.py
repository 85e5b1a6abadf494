"""The operator's two listeners of a gateway, which are separate from the base URL. One is a unix socket in a 0700
directory, with detailed probes, this process's own metrics and `POST /drain`. The other is for scrapers, and is
read-only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiohttp import hdrs, web

from gateway.base.addresses import LOOPBACK, within
from gateway.base.app_keys import LIFECYCLE, SETTINGS
from gateway.generation.served.models import MODELS
from gateway.generation.stream import GENERATION
from gateway.http.route_table import Handler
from gateway.routes import health
from gateway.telemetry.gathering import gather
from gateway.telemetry.metrics import METRICS
from workers.process.metrics_text import Page

MAIN = web.AppKey("main", web.Application)
DRAIN: web.AppKey[Callable[[], None]] = web.AppKey("drain")


async def readyz(request: web.Request) -> web.Response:
    """Answers as on the base URL, with linked workers by model, those that drain, and the settings of models as digests."""
    main = request.app[MAIN]
    lifecycle, fleet, served = main[LIFECYCLE], main[GENERATION].fleet, main[MODELS].served
    models = {name: model.source.digest for name, model in served.items() if model.source is not None}
    return health.as_response(
        lifecycle.report(), workers=lifecycle.num_workers(), draining=fleet.draining, models=models
    )


async def own_metrics(request: web.Request) -> web.Response:
    return _answer(request.app[MAIN][METRICS].page(request.headers.get("accept", "")))


async def all_metrics(request: web.Request) -> web.Response:
    """Answers with the metrics of all gateway processes of this home, whichever of them is asked."""
    sockets = sorted(request.app[MAIN][SETTINGS].run_dir.glob("gateway-*.sock"))
    return _answer(await gather(sockets, request.headers.get("accept", "")))


def _answer(page: Page) -> web.Response:
    return web.Response(body=page.body, headers={"content-type": page.content_type})


async def drain(request: web.Request) -> web.Response:
    """Drains like SIGTERM, without the exit: unready at once, nothing new after the grace time."""
    request.app[DRAIN]()
    return web.json_response({"status": "draining"}, status=202)


def create_ops_app(main: web.Application, start_drain: Callable[[], None]) -> web.Application:
    app = _app_of(main)
    app[DRAIN] = start_drain
    app.router.add_get("/metrics", own_metrics)
    app.router.add_post("/drain", drain)
    return app


def create_scraped_app(main: web.Application) -> web.Application:
    app = _app_of(main, middlewares=[_not_sent_on])
    app.router.add_get("/metrics", all_metrics)
    return app


def _app_of(main: web.Application, **options: Any) -> web.Application:
    app = web.Application(**options)
    app[MAIN] = main
    app[LIFECYCLE] = main[LIFECYCLE]
    app.router.add_get("/livez", health.livez)
    app.router.add_get("/readyz", readyz)
    return app


@web.middleware
async def _not_sent_on(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers only local programs if the peer is this machine: no page in a browser, whose Host is another name, and no
    proxy. Access from elsewhere is allowed by the operator's choice of the bind address.
    """
    if within(request.remote or "", LOOPBACK) and not is_local(request):
        raise web.HTTPNotFound
    return await handler(request)


def is_local(request: web.Request) -> bool:
    """Returns whether the peer is a loopback address that asks for a loopback host and was not forwarded by a proxy."""
    if any(name in request.headers for name in ("forwarded", "x-forwarded-for", "x-real-ip", "via")):
        return False
    host = request.headers.get(hdrs.HOST, "").lower().rpartition(":")
    name = (host[0] if host[1] and host[2].isdigit() else request.headers.get(hdrs.HOST, "").lower()).strip("[]")
    return within(request.remote or "", LOOPBACK) and (name == "localhost" or within(name, LOOPBACK))
