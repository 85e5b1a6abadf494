"""The function that reads the upstreams in force anew; `gateway/resources.py` makes it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

SERVE_UPSTREAMS: web.AppKey[Callable[[], Awaitable[None]]] = web.AppKey("serve_upstreams")
