"""Every route with the scope it needs. Access is denied by default: a route that is not in a table is a 404.

A module of routes contributes a `list[Route]`. `app.create_app` adds them up, and the authentication middleware reads
the scope from the matched route. `tests/architecture` enumerates the sum against identities.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
from aiohttp import web

from gateway.base.errors import ApiError

Scope = Literal[
    "none",  # anyone: probes
    "console",  # pages for people: a page finds its session by itself and checks that session's key
    "any",  # any tenant key
    "chat",
    "embeddings",
    "batch",
    "files:read",
    "files:write",
    "usage:read",  # tenant keys with it see their own tenant; the operator sees all
    "keys",  # tenant keys that manage keys of their own tenant
    "run",  # a jobs process, with the credential of a response in the background
    "admin",  # operator keys only
]

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_JSON_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Route:
    method: Literal["GET", "POST", "DELETE", "PATCH", "PUT", "*"]
    """The star stands for every method that no other route of the path has."""
    path: str
    handler: Handler
    scope: Scope
    max_body_bytes: int = MAX_JSON_BYTES
    json_body: bool = True
    """POST bodies must be application/json. If it is False, the handler reads the body itself (uploads)."""
    shows: Callable[[web.Request, ApiError], web.Response] | None = None
    """Makes the answer of a refusal before the handler. None stands for JSON in the words of the API."""
    or_scope: Scope | None = None
    """Another scope that a tenant's key may have instead."""
    takes: type[msgspec.Struct] | None = None
    """The body's fields, for the API's description. None means that there is no body, or that it is described
    elsewhere.
    """


ROUTES = web.AppKey("routes", dict[web.AbstractRoute, Route])
