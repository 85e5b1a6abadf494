"""Home: what was spent, how much of it the cache saved, what failed, and what would stop requests first."""

from __future__ import annotations

from aiohttp import web

from gateway.console import pages
from gateway.console.viewer import Viewer


async def show_home(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    return pages.show(request, viewer, "home.html")


ROUTES = [pages.get("", show_home)]
