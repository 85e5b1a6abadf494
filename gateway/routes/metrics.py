"""`GET /metrics` on the base URL: one page over all gateway processes of this host, for loopback peers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
from aiohttp import web

from gateway.keys import SETTINGS
from gateway.routes.table import Route
from gateway.telemetry.exposition import gathered

PEER_S = 0.25


async def metrics(request: web.Request) -> web.Response:
    sockets = sorted(request.app[SETTINGS].run_dir.glob("gateway-*.sock"))
    pages = await asyncio.gather(*(_page(path) for path in sockets))
    slots = [path.stem.removeprefix("gateway-") for path in sockets]
    page = gathered(zip(slots, pages, strict=True), request.headers.get("accept", ""))
    return web.Response(body=page.body, headers={"content-type": page.content_type})


async def _page(path: Path) -> str | None:
    """None: the process is silent or gone."""
    timeout = aiohttp.ClientTimeout(total=PEER_S)
    try:
        async with (
            aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(path)), timeout=timeout
            ) as session,
            session.get("http://gateway/metrics") as answer,
        ):
            return await answer.text() if answer.status == 200 else None
    except (aiohttp.ClientError, TimeoutError):
        return None


ROUTES = [Route("GET", "/metrics", metrics, "loopback")]
