"""`POST /admin/v1/verify-books`: the equations of the ledger, over all of it. Operator keys only."""

from __future__ import annotations

from aiohttp import web

from gateway.base.app_keys import DATABASE, SETTINGS
from gateway.books.verification import verify
from gateway.http.route_table import Route
from gateway.http.sql import translated
from gateway.metering.metering import METERING
from gateway.schema.organization import reply


async def create(request: web.Request) -> web.Response:
    """200 also when something is wrong: the answer says what. It reads the whole ledger."""
    with translated():
        found = await verify(request.app[DATABASE], request.app[SETTINGS].journals_dir, request.app[METERING].link)
    return reply(found.shape())


ROUTES = [Route("POST", "/admin/v1/verify-books", create, "admin")]
