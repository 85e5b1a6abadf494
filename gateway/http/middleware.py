"""The middleware that every request passes, outermost first: the record and its observers, errors in our shape, host,
authentication and scope.

Access is denied by default: a route that is not in the table is a 404.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from accounting.values.types import Principal
from gateway.base import errors, ids
from gateway.base.addresses import client_address
from gateway.base.app_keys import LIFECYCLE, SETTINGS, UNLISTED_PROXY
from gateway.http import body
from gateway.http.auth import AUTH, PRINCIPAL
from gateway.http.cors import stamp_origin
from gateway.http.dialects import refusal, speaks_anthropic
from gateway.http.http_limits import stamp
from gateway.http.last_use import LAST_USE
from gateway.http.route_table import ROUTES, Route
from gateway.intake.intake import HELD, SHARE, Held
from gateway.telemetry.keys import OBSERVERS, PAGE_READ, RECORD, TRACING
from gateway.telemetry.record import RequestRecord
from workers.process.logs import HANDLED

logger = logging.getLogger(__name__)

READS_ALL = "admin:read"
"""The scope of an operator's key that reads everything and changes nothing."""
KEYLESS = frozenset({"none", "console"})
"""The scopes of routes that are asked without an API key."""
RETRY_COUNT = "x-stainless-retry-count"
TRACE_RESPONSE = "traceresponse"
"""The answer's header with the request's own trace, for callers that send a `traceparent` (W3C Trace Context 2)."""
CLIENT_ID = "x-client-request-id"
"""A request's and its answer's header with the client's own name of the request; in the request, `x-request-id` does
as well.
"""
NULL = "%00"
"""A null character in a path. No object has it in its id or name, and a statement that asks for one fails on PostgreSQL.
"""
_CLIENT_ID = re.compile(r"[!-~]{1,512}")
_COUNT = re.compile(r"[0-9]{1,4}")
_SHOWN_PATH = re.compile(r"[A-Za-z0-9._~/:%-]{1,128}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Makes the record and hands it to the observers once the request and its settlement are over."""
    record = request[RECORD] = RequestRecord(ids.request_id(), request.method)
    record.mark("accepted")
    record.client_request_id = _client_id(request)
    record.traceparent = request.headers.get("traceparent", "")[:128]
    record.peer = request.remote or ""
    record.is_page_read = request.get(PAGE_READ, False)
    count = request.headers.get(RETRY_COUNT, "")
    record.num_retries = int(count) if _COUNT.fullmatch(count) else 0
    request.app[TRACING].start(record)
    HANDLED.set(record)  # for good: the connection logs what no handler expected, in this task
    try:
        response = await handler(request)
        record.status = response.status
        return response
    except asyncio.CancelledError:
        record.status = 499
        raise
    except BaseException:
        # A client that leaves makes the next write of its stream fail, too.
        record.status = 499 if record.disconnect_phase else 500
        raise
    finally:
        record.mark("last_byte")
        request.app[OBSERVERS].publish(record)


def _client_id(request: web.Request) -> str:
    """Returns the client's own name of the request, or nothing if it is not 1 to 512 printable ASCII characters."""
    name = request.headers.get(CLIENT_ID) or request.headers.get("x-request-id") or ""
    return name if _CLIENT_ID.fullmatch(name) else ""


@web.middleware
async def error_bodies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns refusals into answers. Any other exception goes on to the connection's last resort: a 500. An answer that has
    begun is cut off, so that its client does not take what it has for the whole.
    """
    try:
        return await handler(request)
    except errors.ApiError as error:
        record = request[RECORD]
        record.error_code = error.code or error.type
        if error.headgate is not None:
            record.refused_by = f"{error.headgate.get('level')}/{error.headgate.get('dimension')}"
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun; only closing is left") from error
        route = request.app[ROUTES].get(request.match_info.route)
        return refusal(request, error) if route is None or route.shows is None else route.shows(request, error)
    except web.HTTPException as error:
        told = _of_aiohttp(error, _asked(request))
        request[RECORD].error_code = told.code or told.type
        return refusal(request, told)


def _asked(request: web.Request) -> str:
    """Returns method and path in a form that a message may show, because the path is the client's text."""
    path = request.rel_url.raw_path
    return f"{request.method} {path if _SHOWN_PATH.fullmatch(path) else '(this path)'}"


def _of_aiohttp(error: web.HTTPException, asked: str) -> errors.ApiError:
    if isinstance(error, web.HTTPMethodNotAllowed):
        return errors.method_not_allowed(asked, error.allowed_methods)
    if error.status == 404:
        return errors.unknown_url(asked)
    if error.status == 413:
        return errors.too_large()
    return errors.invalid("The request cannot be handled.")


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Makes all checks up to the body, in this order: host 400, key 401, route 404 and 405, scope 403, media type 415,
    size 413 (api.md 1.2).
    """
    app = request.app
    if request.version not in {(1, 0), (1, 1)}:
        raise errors.invalid("The request is not valid HTTP.")
    if request.version == (1, 1) and len(request.headers.getall(hdrs.HOST, ())) != 1:
        raise errors.invalid("Exactly one Host header is needed.")
    route = app[ROUTES].get(request.match_info.route)
    if route is not None:
        request[RECORD].route = route.path
    if route is None or route.scope not in KEYLESS:
        await _authenticate(request)
    if request.match_info.http_exception is not None:
        raise request.match_info.http_exception
    if route is None or NULL in request.rel_url.raw_path:
        raise errors.not_found()
    _authorize(request, route)
    if not app[LIFECYCLE].accepting and route.scope != "none":
        raise errors.unavailable("server_draining", "The server is shutting down.")
    body.check_head(request, route)
    held = Held(app, request.get(PRINCIPAL))
    request[SHARE] = held.share
    try:
        response = await handler(request)
    except BaseException:
        held.close()
        raise
    request[HELD] = held  # the connection gives it back when the answer is written
    return response


async def check_again(request: web.Request) -> None:
    """Checks the key of a request that has waited: its rights may have changed. Raises `ApiError` as at the beginning."""
    request[PRINCIPAL] = await _principal(request)
    _authorize(request, request.app[ROUTES][request.match_info.route])


async def _principal(request: web.Request) -> Principal:
    app = request.app
    peer, forwarded_for = request.remote or "", request.headers.getall("x-forwarded-for", ())
    if sentence := app[UNLISTED_PROXY].hint(peer, forwarded_for):
        logger.warning(sentence)
    address = client_address(peer, forwarded_for, app[SETTINGS].trusted_networks)
    return await app[AUTH].authenticate(request.headers, address)


async def _authenticate(request: web.Request) -> None:
    app = request.app
    request[PRINCIPAL] = principal = await _principal(request)
    app[LAST_USE].note(principal.key_id)
    record = request[RECORD]
    record.principal = principal
    record.mark("authenticated")


def _authorize(request: web.Request, route: Route) -> None:
    if route.scope in KEYLESS:
        return
    if not allows(route, request[PRINCIPAL]):
        raise errors.forbidden("insufficient_scope", "This API key may not do this.")
    refuse_suspended(request[PRINCIPAL])


def refuse_suspended(principal: Principal) -> None:
    """Refuses a tenant that is suspended or archived. Raises `ApiError` 403."""
    if (refused := errors.tenant_closed(principal.tenant_status)) is not None:
        raise refused


def allows(route: Route, principal: Principal) -> bool:
    """Decides whether an identity may use a route, by the matrix of route scopes and identities; pure."""
    if principal.kind == "operator":
        may = "admin" in principal.scopes or (READS_ALL in principal.scopes and route.method == "GET")
        return may and route.scope in {"admin", "usage:read"}
    if route.scope == "any":
        return True
    return route.scope != "admin" and not principal.scopes.isdisjoint({route.scope, route.or_scope})


async def stamp_answer(request: web.Request, response: web.StreamResponse) -> None:
    """Stamps each answer just before its head is written, streams included."""
    stamp_origin(request, response)
    record = request.get(RECORD)
    if record is None:
        stamp(response, ids.request_id(), 0)
        return
    if not record.is_waiting:
        record.mark("first_byte")
    stamp(response, record.request_id, int(record.duration_ms))
    if ignored := request.get(body.IGNORED):
        response.headers["x-headgate-ignored"] = ", ".join(ignored)
    if record.client_request_id:
        response.headers[CLIENT_ID] = record.client_request_id
    if speaks_anthropic(request):
        response.headers["request-id"] = record.request_id
    if record.traceparent:
        response.headers[TRACE_RESPONSE] = record.outgoing_traceparent
    lifecycle = request.app[LIFECYCLE]
    if lifecycle.draining.is_set() and response.status != 101:
        response.headers[hdrs.CONNECTION] = "close"
