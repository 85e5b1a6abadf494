"""`POST /admin/v1/verify-books`: checks the equations of the ledger, over all of it. Operator keys only."""

from __future__ import annotations

from aiohttp import web

from gateway.base.app_keys import DATABASE, SETTINGS
from gateway.books.verification import verify
from gateway.http.route_table import Route
from gateway.http.sql import translated
from gateway.metering.metering import METERING
from gateway.schema.organization import reply


async def create(request: web.Request) -> web.Response:
    """Verify the books, over the whole ledger; the answer is 200 also if an equation fails, and names the failures."""
    with translated():
        found = await verify(request.app[DATABASE], request.app[SETTINGS].journals_dir, request.app[METERING].link)
    return reply(found.shape())


ROUTES = [Route("POST", "/admin/v1/verify-books", create, "admin")]
