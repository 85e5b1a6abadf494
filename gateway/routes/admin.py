"""Helpers that the routes of objects share, the operator's and those of tenants' administrators: a checked body, the actor,
whose objects may be seen, the time, and the route with its scope.
"""

from __future__ import annotations

import time
from typing import Any, TypedDict, TypeVar

import msgspec
from aiohttp import web

from gateway.base import errors
from gateway.http import body
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Handler, Route, Scope
from gateway.intake.json_body import decode_stored
from gateway.schema import query
from gateway.schema.convert import convert
from gateway.schema.parameters import unknown_in

PROJECTS = "/v1/organization/projects"
PROJECT = PROJECTS + "/{project_id}"
MAX_BODY_BYTES = 64 * 1024
T = TypeVar("T", bound=msgspec.Struct)


async def json_object(request: web.Request) -> dict[str, Any]:
    return decode_stored(await body.read(request, MAX_BODY_BYTES))


async def fields(request: web.Request, kind: type[T], unsupported: tuple[str, ...] = ()) -> T:
    value = await json_object(request)
    for name in unsupported:
        if value.get(name) is not None:
            raise errors.invalid(f"The parameter '{name}' is not supported.", name, "unsupported_parameter")
    return known_of(request, value, kind)


def known_of(request: web.Request, value: dict[str, Any], kind: type[T]) -> T:
    """Converts a body whose type may leave names unknown: the answer names them. Raises `ApiError` 400."""
    found = convert(value, kind)
    request[body.IGNORED] = unknown_in(value, kind)
    return found


def project(request: web.Request) -> str:
    return part(request, "project_id")


def part(request: web.Request, name: str) -> str:
    return request.match_info[name]


def only_of(request: web.Request) -> str | None:
    """Returns the tenant whose objects the caller may see. None stands for all tenants."""
    principal = request[PRINCIPAL]
    return None if principal.kind == "operator" else principal.tenant_id


def actor(request: web.Request) -> str:
    return request[PRINCIPAL].key_id


def now() -> int:
    return int(time.time())


class Who(TypedDict):
    now: int
    actor: str


def who(request: web.Request) -> Who:
    """Returns what every change is noted with: its second and the key that asked for it."""
    return Who(now=now(), actor=actor(request))


def expiry(seconds: int | None) -> int | None:
    return None if seconds is None else now() + seconds


def ends_streams(request: web.Request, default: bool = True) -> bool:
    """Returns whether a change also ends running requests, not only future ones: `?revoke=immediate` or `graceful`.
    `default` says whether the change takes access away.
    """
    asked = query.choice(request.query, "revoke", ("immediate", "graceful"))
    return default if asked is None else asked == "immediate"


def route(
    method: Any, path: str, handler: Handler, takes: type[msgspec.Struct] | None = None, scope: Scope = "admin"
) -> Route:
    """Makes a route, an operator's by default. `takes` is the type of the body; None means that no body is read."""
    return Route(method, path, handler, scope, MAX_BODY_BYTES, json_body=takes is not None, takes=takes)
