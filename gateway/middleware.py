"""What every request passes, outermost first: the record and its observers → errors in our shape → host →
authentication and scope. Deny by default: a route that is not in the table is a 404.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from accounting.types import Principal
from gateway import body, errors, ids
from gateway.addresses import client_address
from gateway.auth import AUTH
from gateway.http_limits import stamp
from gateway.keys import (
    KEY_CONNECTIONS,
    LAST_USE,
    LIFECYCLE,
    OBSERVERS,
    PRINCIPAL,
    RECORD,
    ROUTES,
    SETTINGS,
    TRACING,
)
from gateway.routes.table import Route
from gateway.telemetry.record import RequestRecord

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Makes the record and hands it to the observers once the request and its settlement are over."""
    record = request[RECORD] = RequestRecord(ids.request_id(), request.method)
    record.mark("accepted")
    record.client_request_id = request.headers.get("x-request-id", "")[:128]
    record.traceparent = request.headers.get("traceparent", "")[:128]
    record.peer = request.remote or ""
    request.app[TRACING].start(record)
    try:
        response = await handler(request)
        record.status = response.status
        return response
    except asyncio.CancelledError:
        record.status = 499
        raise
    except BaseException:
        record.status = 500
        raise
    finally:
        record.mark("last_byte")
        _publish(request.app, record)


def _publish(app: web.Application, record: RequestRecord) -> None:
    """Now, or when the settlement that outlives the request is done."""
    if record.settling is not None and not record.settling.done():
        record.settling.add_done_callback(lambda _: _publish(app, record))
        return
    for observer in app[OBSERVERS]:
        observer(record)


@web.middleware
async def error_bodies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refusals become answers. What is none of ours goes on to the connection's last resort: a 500."""
    try:
        return await handler(request)
    except errors.ApiError as error:
        request[RECORD].error_code = error.code or error.type
        return error.response()
    except web.HTTPException as error:
        return _of_aiohttp(error).response()


def _of_aiohttp(error: web.HTTPException) -> errors.ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        allow = {"allow": ", ".join(sorted(error.allowed_methods))}
        return errors.ApiError(405, "Method not allowed.", code="method_not_allowed", headers=allow)
    if error.status == 404:
        return errors.not_found()
    if error.status == 413:
        return errors.too_large()
    return errors.invalid("The request cannot be handled.")


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The order of checks up to the body: host 400, key 401, route 404 and 405, scope 403, media type 415,
    size 413 (api.md 1.2)."""
    if request.version not in {(1, 0), (1, 1)}:
        raise errors.invalid("The request is not valid HTTP.")
    if request.version == (1, 1) and len(request.headers.getall(hdrs.HOST, ())) != 1:
        raise errors.invalid("Exactly one Host header is needed.")
    route = request.app[ROUTES].get(request.match_info.route)
    if route is not None:
        request[RECORD].route = route.path
    if route is None or route.scope not in {"none", "loopback"}:
        await _authenticate(request)
    if request.match_info.http_exception is not None:
        raise request.match_info.http_exception
    if route is None:
        raise errors.not_found()
    _authorize(request, route)
    if not request.app[LIFECYCLE].accepting and route.scope != "none":
        raise errors.unavailable("server_draining", "The server is shutting down.")
    body.check_head(request, route)
    key_connections = request.app[KEY_CONNECTIONS]
    with request.app[LIFECYCLE].running(), key_connections.held(request.get(PRINCIPAL)):
        return await handler(request)


async def _authenticate(request: web.Request) -> None:
    address = client_address(
        request.remote or "",
        request.headers.getall("x-forwarded-for", ()),
        request.app[SETTINGS].trusted_networks,
    )
    principal = await request.app[AUTH].authenticate(request.headers, address)
    request[PRINCIPAL] = principal
    request.app[LAST_USE].note(principal.key_id)
    record = request[RECORD]
    record.principal = principal
    record.mark("authenticated")


def _authorize(request: web.Request, route: Route) -> None:
    if route.scope == "none":
        return
    if route.scope == "loopback":
        if not is_local(request):
            raise errors.not_found()
        return
    if not allows(route, request[PRINCIPAL]):
        raise errors.forbidden("insufficient_scope", "This API key may not do this.")
    status = request[PRINCIPAL].tenant_status
    if status == "suspended":
        raise errors.forbidden("tenant_suspended", "This project is suspended.")
    if status == "archived":
        raise errors.forbidden("project_archived", "This project is archived.")


def allows(route: Route, principal: Principal) -> bool:
    """The matrix of route scopes and identities; pure."""
    if principal.kind == "operator":
        return route.scope in {"admin", "usage:read"}
    if route.scope == "any":
        return True
    return route.scope != "admin" and route.scope in principal.scopes


def is_local(request: web.Request) -> bool:
    """A loopback peer that asks for a loopback host and was not sent on by a proxy."""
    if any(
        name in request.headers for name in ("forwarded", "x-forwarded-for", "x-real-ip", "via")
    ):
        return False
    host = request.headers.get(hdrs.HOST, "").lower().rpartition(":")
    name = (
        host[0] if host[1] and host[2].isdigit() else request.headers.get(hdrs.HOST, "").lower()
    ).strip("[]")
    return _is_loopback(request.remote or "") and (name == "localhost" or _is_loopback(name))


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


async def stamp_answer(request: web.Request, response: web.StreamResponse) -> None:
    """Runs just before any head is written, streams included."""
    record = request.get(RECORD)
    if record is None:
        stamp(response, ids.request_id(), 0)
        return
    record.mark("first_byte")
    stamp(response, record.request_id, int(record.duration_ms))
    lifecycle = request.app[LIFECYCLE]
    if lifecycle.draining.is_set() and response.status != 101:
        response.headers[hdrs.CONNECTION] = "close"
