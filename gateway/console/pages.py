"""The parts that all pages share: who looks, the frame around the content, the headers that keep other sites out.

A screen is a function of the request and its viewer that returns a response. Refusals of the API become a page that
says the same sentence. Nothing is loaded from another host, and no script or style stands inside a page.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Literal, TypeVar
from urllib.parse import parse_qsl, quote

import jinja2
from aiohttp import hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy, MultiDict
from yarl import URL

from gateway.base import errors
from gateway.base.addresses import client_address
from gateway.base.app_keys import REDIS, SETTINGS
from gateway.base.running import one_at_a_time
from gateway.console import formats, sessions, uploads
from gateway.console.calls import Refused
from gateway.console.navigation import is_for, menu_of, screen_of
from gateway.console.tables import File, Table, chosen
from gateway.console.viewer import ROLE_NAMES, Viewer
from gateway.http import body
from gateway.http.auth import AUTH
from gateway.http.middleware import refuse_suspended
from gateway.http.route_table import Route
from gateway.intake.intake import INTAKE, SHARE, Share
from gateway.intake.text_work import TEXT_WORK
from gateway.telemetry.keys import RECORD

logger = logging.getLogger(__name__)

ROOT = "/console"
SIGN_IN = ROOT + "/sign-in"
SIGN_OUT = "/sign-out"
COOKIE = "headgate_console"
MAX_FORM_BYTES = 2 * 1024 * 1024
MAX_OPEN_FORM_BYTES = 16 * 1024
"""The longest form of somebody who has not signed in."""
MAX_FORM_FIELDS = 100
CELL_BYTES = 32
"""The number of bytes of a body that take as long as one cell of a file."""
MAX_CELLS_INLINE = 2_000
"""A page with more cells of tables is rendered off the loop."""
MAX_PART_CHARS = 256
"""The longest part of a page's path: the name of an object."""

HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}
TLS_ALONE = "max-age=604800"
"""A browser that has seen a page over this gateway's own TLS asks the host by TLS alone, for a week. It does so on every port,
so that a longer time would long keep it from what else the host serves without TLS.
"""
LOCALHOST = "localhost"
"""A browser would keep that for all servers of this name, and it has many."""

EXPORTING: web.AppKey[set[str]] = web.AppKey("console_exporting", set)
"""The tenants for which a file is made now. Each may have one on a gateway at a time."""

Screen = Callable[[web.Request, Viewer], Awaitable[web.StreamResponse]]
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _static(name: str) -> bytes:
    return (files("gateway.console") / "static" / name).read_bytes()


ASSETS = {
    name: (_static(name), kind)
    for name, kind in (("console.css", "text/css"), ("console.js", "text/javascript"), ("mark.svg", "image/svg+xml"))
}
VERSION = hashlib.sha256(b"".join(data for data, _ in ASSETS.values())).hexdigest()[:12]
"""The version in the address of scripts and styles, so that a browser may keep them until they change."""

_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.PackageLoader("gateway.console"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_ENVIRONMENT.filters |= formats.FILTERS
_ENVIRONMENT.globals |= {"root": ROOT, "version": VERSION}


def get(path: str, screen: Screen, *, changes: bool = False) -> Route:
    """Returns the route of a screen. Without a session it leads to the sign-in page. One that is a form alone `changes`
    something, and a role that changes nothing is refused."""
    return _route("GET", path, _for_viewers(screen, path, changes=changes))


def post(path: str, action: Screen, max_body_bytes: int = MAX_FORM_BYTES, *, is_for_all: bool = False) -> Route:
    """Returns the route of a form. A form without its session's token is refused, and one of a role that changes
    nothing unless it `is_for_all`.
    """
    handler = _for_viewers(_checked(action, max_body_bytes), path, changes=not is_for_all)
    return _route("POST", path, handler, max_body_bytes)


def open_get(path: str, handler: Handler) -> Route:
    """Returns the route of a page that needs no session."""
    return _route("GET", path, _shown(handler))


def open_post(path: str, handler: Handler) -> Route:
    """Returns the route of a form that anybody may send, and which is short for that."""
    return _route("POST", path, _shown(handler), MAX_OPEN_FORM_BYTES)


def _route(
    method: Literal["GET", "POST", "*"], path: str, handler: Handler, max_body_bytes: int = MAX_FORM_BYTES
) -> Route:
    return Route(method, ROOT + path, handler, "console", max_body_bytes, json_body=False, shows=_refused_before)


def _refused_before(request: web.Request, error: errors.ApiError) -> web.Response:
    """Returns the page of a refusal from before the handler: a form that is too long, a gateway that stops."""
    response = _refusal(request, error, None)
    response.headers.update(HEADERS)
    return response


class LargePage(web.Response):
    """A page with large tables. It is rendered after the screen has returned, off the loop."""

    def __init__(self, status: int, num_cells: int, render: Callable[[], str]) -> None:
        super().__init__(status=status, content_type="text/html", charset="utf-8")
        self.num_cells = num_cells
        self._render = render

    def made(self) -> bytes:
        return self._render().encode()


def show(
    request: web.Request,
    viewer: Viewer,
    template: str,
    *,
    table: Table | None = None,
    tables: Sequence[Table] | Mapping[str, Table] = (),
    refused: Refused | None = None,
    status: int = 200,
    **values: Any,
) -> web.Response:
    """Renders a screen. The page that shows a refusal has its status.

    With `?format=` the screen's table is exported instead; of several `tables` the one that `?table=` names. A refusal is
    a page all the same, so that no file is kept that lacks its rows.
    """
    status = status if refused is None else refused.status
    wanted = request.query.get("format")
    if wanted and status < 400:
        return File(table or chosen(tables, request.query.get("table")), wanted)
    shown = tables.values() if isinstance(tables, Mapping) else tables
    num_cells = sum(len(one.shown) * len(one.columns) for one in (*shown, *([table] if table else [])))
    values |= {"table": table or chosen(tables, None), "tables": tables, "refused": refused}
    if num_cells <= MAX_CELLS_INLINE:
        return _page(request, template, status=status, viewer=viewer, **values)
    render = functools.partial(_rendered, request, template, status=status, viewer=viewer, **values)
    return LargePage(status, num_cells, render)


async def in_turn(request: web.Request, num_cells: int, function: Callable[[], T]) -> T:
    """Runs a function that makes so many cells: off the loop, when it is the tenant's turn, unless they are few."""
    if num_cells <= MAX_CELLS_INLINE:
        return function()
    return await request.app[TEXT_WORK].run(request[TENANT], num_cells * CELL_BYTES, function)


def part(request: web.Request, name: str) -> str:
    """Returns a part of the page's path, quoted for a path of the API or of another page."""
    return quote(request.match_info[name], safe="")


async def nowhere(request: web.Request, viewer: Viewer) -> web.StreamResponse:
    """Answers for addresses that no page has: the API's 404 would be a line of JSON."""
    if not request.match_info["rest"]:
        return see_other("")
    raise errors.not_found("There is no such page.")


def no_form(path: str) -> Route:
    """Returns the route of what is sent to a page that takes nothing. The API would ask it for a key, and count it as a
    bad one.
    """

    async def refuse(request: web.Request) -> web.StreamResponse:
        raise errors.method_not_allowed(f"{request.method} of this page", ["GET"])

    return _route("*", path, _shown(refuse))


def see_other(path: str, **query: Any) -> web.Response:
    """Leads to another page of the console after a form, so that a reload does not send the form again. The parts of the
    path are quoted.
    """
    target = URL.build(path=ROOT + path, query={name: value for name, value in query.items() if value}, encoded=True)
    return web.Response(status=303, headers={hdrs.LOCATION: str(target)})


async def fields_of(request: web.Request, most_bytes: int = MAX_FORM_BYTES) -> MultiDict[str]:
    """Reads a form. Raises `ApiError`."""
    if FORM in request:
        return request[FORM]
    read = _READERS.get(request.content_type)
    if read is None:
        raise errors.ApiError(415, "The form must be urlencoded.", code="unsupported_media_type")
    data = await body.read(request, most_bytes)
    parse = functools.partial(read, data, request.headers[hdrs.CONTENT_TYPE])
    try:
        if len(data) <= MAX_OPEN_FORM_BYTES:
            pairs = parse()
        else:  # its escapes may take a second, so it waits for its tenant's turn
            pairs = await request.app[TEXT_WORK].run(request[TENANT], len(data), parse)
        request[FORM] = MultiDict(pairs)
    except ValueError:
        raise errors.invalid("The form cannot be read.") from None
    return request[FORM]


def _urlencoded(data: bytes, _: str) -> list[tuple[str, str]]:
    pairs = parse_qsl(data.decode(), keep_blank_values=True, max_num_fields=MAX_FORM_FIELDS, errors="strict")
    return [(name, value.strip()) for name, value in pairs]


_READERS = {"application/x-www-form-urlencoded": _urlencoded, "multipart/form-data": uploads.fields}


FORM = web.RequestKey("console_form", MultiDict[str])
TENANT = web.RequestKey("console_tenant", str)
"""The tenant of the session. A form that anybody may send has none."""


def _for_viewers(screen: Screen, path: str, *, changes: bool = False) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        viewer = await _viewer_of(request)
        if viewer is None:
            return _to_sign_in(request)
        request[TENANT] = viewer.principal.tenant_id
        try:
            _check(request, viewer, path, changes)
            share = request[SHARE] = Share(request.app[INTAKE], viewer.principal)
            with share.held(), _one_file(request, viewer):
                response = await screen(request, viewer)
                if isinstance(response, File | LargePage):
                    response.body = await in_turn(request, response.num_cells, response.made)
                return response
        except Refused as refused:
            if refused.status == 401:
                return _to_sign_in(request)
            return _refusal(request, refused, viewer)
        except errors.ApiError as error:
            return _refusal(request, error, viewer)

    return _shown(functools.wraps(screen)(handler))


def _check(request: web.Request, viewer: Viewer, path: str, changes: bool) -> None:
    """Refuses a page that the viewer's menu does not lead to, and parts of a path that no object's name can have. A
    suspended tenant may sign out. Raises `ApiError` 403, 404.

    The API decides what a key may do. It is not asked by every page that a role has no use for, and a form whose fields
    are wrong is refused before its call.
    """
    if path != SIGN_OUT:
        refuse_suspended(viewer.principal)
    if not is_for(viewer.role, path) or (changes and not viewer.may_change):
        raise errors.forbidden("insufficient_scope", "This API key may not do this.")
    if any(len(value) > MAX_PART_CHARS or not value.isprintable() for value in request.match_info.values()):
        raise errors.not_found()


def _one_file(request: web.Request, viewer: Viewer) -> contextlib.AbstractContextManager[None]:
    """Holds the tenant's place for a file, if one is asked for: its rows lie in memory. Raises `ApiError` 429."""
    if not request.query.get("format"):
        return contextlib.nullcontext()
    message = "Another file is being made for you: one at a time. Try again when it has come."
    return one_at_a_time(request.app[EXPORTING], viewer.principal.tenant_id, message)


def _checked(action: Screen, most_bytes: int) -> Screen:
    @functools.wraps(action)
    async def checked(request: web.Request, viewer: Viewer) -> web.StreamResponse:
        refuse_other_sites(request)
        token = request.headers.get("x-form-token") or (await fields_of(request, most_bytes)).get("form_token")
        if not viewer.session.accepts(token or ""):
            raise errors.forbidden(
                "form_expired", "This form is no longer valid. Go back, reload the page and try again."
            )
        return await action(request, viewer)

    return checked


def refuse_other_sites(request: web.Request) -> None:
    """Refuses a form that a page of another site sends. Raises `ApiError` 403.

    Sec-Fetch-Site is the browser's own verdict, which no proxy changes. A browser sends it over TLS and to this machine;
    without it `Origin` is compared with `Host`.
    """
    site = request.headers.get("sec-fetch-site")
    if not (_is_own_origin(request) if site is None else site in {"same-origin", "none"}):
        raise errors.forbidden(
            "other_site",
            "This form was sent by a page of another site. A proxy in front of Headgate has to pass on the Host header "
            "as the browser sent it, with its port.",
        )


def _is_own_origin(request: web.Request) -> bool:
    origin = request.headers.get(hdrs.ORIGIN)
    if origin is None:
        return True
    try:
        theirs = URL(origin)
        # The scheme is the browser's, as TLS may end at a proxy. A port that goes without saying may be said.
        ours = URL.build(scheme=theirs.scheme, authority=request.host)
        return theirs.host is not None and (theirs.host, theirs.port) == (ours.host, ours.port)
    except ValueError:
        return False


def _shown(handler: Handler) -> Handler:
    """Adds the headers of a page, and turns a refusal or a fault into a page."""

    @functools.wraps(handler)
    async def shown(request: web.Request) -> web.StreamResponse:
        try:
            response = await handler(request)
        except errors.ApiError as error:
            response = _refusal(request, error, None)
        except web.HTTPException:
            raise
        except Exception as error:  # the page's outermost frame: it is logged as an API's 500 is
            if request.writer.output_size > 0:
                raise  # an answer has begun; the connection is closed
            response = _fault(request, error)
        if not response.prepared:
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            if request.secure and request.url.host != LOCALHOST:
                response.headers[hdrs.STRICT_TRANSPORT_SECURITY] = TLS_ALONE
        return response

    return shown


async def _viewer_of(request: web.Request) -> Viewer | None:
    session = await sessions.find(request.app[REDIS], request.cookies.get(COOKIE, ""))
    if session is None:
        return None
    try:
        principal = await request.app[AUTH].authenticate(key_headers(session.key), address_of(request))
    except errors.ApiError as error:
        if error.status == 401:
            return None
        raise
    return Viewer(request, session, principal)


def key_headers(key: str) -> CIMultiDictProxy[str]:
    return CIMultiDictProxy(CIMultiDict({hdrs.AUTHORIZATION: f"Bearer {key}"}))


def address_of(request: web.Request) -> str:
    forwarded_for = request.headers.getall("x-forwarded-for", ())
    return client_address(request.remote or "", forwarded_for, request.app[SETTINGS].trusted_networks)


def _to_sign_in(request: web.Request) -> web.Response:
    goes_on_at = request.rel_url.raw_path_qs if request.method == "GET" else None
    target = URL.build(path=SIGN_IN, query={"next": goes_on_at} if goes_on_at not in {None, ROOT} else {})
    return web.Response(status=303, headers={hdrs.LOCATION: str(target)})


def _refusal(request: web.Request, refused: Refused | errors.ApiError, viewer: Viewer | None) -> web.Response:
    response = _page(request, "refusal.html", status=refused.status, viewer=viewer, message=refused.message)
    if isinstance(refused, errors.ApiError):
        response.headers.update(refused.headers)
    return response


def _fault(request: web.Request, error: Exception) -> web.Response:
    """Logs an exception that nobody expected, as `GatewayProtocol.handle_error` does for the API, and returns its page."""
    request_id = request[RECORD].request_id
    logger.error("unhandled_exception", exc_info=error, extra={"request_id": request_id})
    response = _page(request, "fault.html", status=500, viewer=None, request_id=request_id)
    response.force_close()
    return response


def open_page(request: web.Request, template: str, status: int = 200, **values: Any) -> web.Response:
    return _page(request, template, status=status, viewer=None, **values)


def _page(
    request: web.Request, template: str, *, status: int = 200, viewer: Viewer | None, **values: Any
) -> web.Response:
    text = _rendered(request, template, status=status, viewer=viewer, **values)
    return web.Response(status=status, text=text, content_type="text/html", charset="utf-8")


def _rendered(request: web.Request, template: str, *, status: int, viewer: Viewer | None, **values: Any) -> str:
    return _ENVIRONMENT.get_template(template).render(
        viewer=viewer,
        role_name=viewer and ROLE_NAMES[viewer.role],
        menu=menu_of(viewer.role, viewer.principal.scopes) if viewer else {},
        screen=screen_of(request.path.removeprefix(ROOT)),
        path=request.path,
        query=request.query,
        here=request.rel_url,
        status=status,
        **values,
    )
