"""Sign-in with an API key, sign-out, and the files that pages load."""

from __future__ import annotations

from aiohttp import hdrs, web

from gateway.base import errors
from gateway.base.addresses import within
from gateway.base.app_keys import REDIS, SETTINGS
from gateway.console import pages, sessions
from gateway.console.viewer import Viewer
from gateway.http.auth import AUTH, Headers
from gateway.http.middleware import refuse_suspended

_YEAR_S = 365 * 24 * 3600


async def sign_in_page(request: web.Request) -> web.Response:
    return pages.open_page(request, "sign_in.html", goes_on_at=_own_path(request.query.get("next", "")), message="")


async def sign_in(request: web.Request) -> web.Response:
    """Exchanges a key for a session. A session that the browser already had ends."""
    pages.refuse_other_sites(request)
    form = await pages.fields_of(request, pages.MAX_OPEN_FORM_BYTES)
    goes_on_at = _own_path(form.get("next", ""))
    key = form.get("key", "")
    try:
        principal = await request.app[AUTH].authenticate(_headers(key), pages.address_of(request))
        if principal.kind == "batch":
            raise errors.unauthorized()
        refuse_suspended(principal)
    except errors.ApiError as error:
        return pages.open_page(request, "sign_in.html", error.status, goes_on_at=goes_on_at, message=error.message)
    await sessions.end(request.app[REDIS], request.cookies.get(pages.COOKIE, ""))
    session = await sessions.begin(request.app[REDIS], key)
    response = web.Response(status=303, headers={hdrs.LOCATION: goes_on_at})
    response.set_cookie(
        pages.COOKIE,
        session.secret,
        max_age=sessions.LIFE_S,
        path=pages.ROOT,
        httponly=True,
        samesite="Lax",
        secure=_is_encrypted(request),
    )
    return response


async def sign_out(request: web.Request, viewer: Viewer) -> web.Response:
    await sessions.end(request.app[REDIS], viewer.session.secret)
    response = web.Response(status=303, headers={hdrs.LOCATION: pages.SIGN_IN})
    response.del_cookie(pages.COOKIE, path=pages.ROOT)
    return response


async def asset(request: web.Request) -> web.Response:
    """Answers with a script or a style. Its address has a version, so a browser keeps it for a year."""
    found = pages.ASSETS.get(request.match_info["name"])
    if found is None:
        raise errors.not_found()
    data, kind = found
    kept = f"public, max-age={_YEAR_S}, immutable" if request.match_info["version"] == pages.VERSION else "no-store"
    return web.Response(body=data, content_type=kind, charset="utf-8", headers={hdrs.CACHE_CONTROL: kept})


def _headers(key: str) -> Headers:
    if not key or not key.isascii() or not key.isprintable():
        raise errors.unauthorized()
    return pages.key_headers(key)


def _own_path(path: str) -> str:
    """Returns where to go on: a path of the console and nothing else, so that no link leads to another site."""
    is_own = path == pages.ROOT or path.startswith((pages.ROOT + "/", pages.ROOT + "?"))
    return path if is_own and path.isascii() and path.isprintable() and "\\" not in path else pages.ROOT


def _is_encrypted(request: web.Request) -> bool:
    """Returns whether the browser's connection is encrypted, as far as a trusted proxy says so."""
    by_proxy = request.headers.get("x-forwarded-proto", "").lower() == "https"
    return request.secure or (by_proxy and within(request.remote or "", request.app[SETTINGS].trusted_networks))


ROUTES = [
    pages.open_get("/sign-in", sign_in_page),
    pages.open_post("/sign-in", sign_in),
    pages.post(pages.SIGN_OUT, sign_out, pages.MAX_OPEN_FORM_BYTES, is_for_all=True),
    pages.open_get("/assets/{version}/{name}", asset),
]
