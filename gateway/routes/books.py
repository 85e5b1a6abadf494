"""`/admin/v1/books`, the state of the books, and `POST /admin/v1/verify-books`, which checks the equations of the ledger
over all of it. Operator keys only.
"""

from __future__ import annotations

from aiohttp import web

from accounting.requests import request_postings
from gateway.base.app_keys import DATABASE, REDIS, SETTINGS
from gateway.books import last_verdict
from gateway.books.bookkeeping import BOOKKEEPING
from gateway.books.verification import verify
from gateway.http.route_table import Route
from gateway.http.sql import reading, translated
from gateway.metering.metering import METERING
from gateway.schema.organization import reply


async def create(request: web.Request) -> web.Response:
    """Verifys the books, over the whole ledger; the answer is 200 also if an equation fails, and names the failures."""
    with translated():
        found = await verify(request.app[DATABASE], request.app[SETTINGS].journals_dir, request.app[METERING].link)
    await last_verdict.keep(request.app[REDIS], found.shape())
    return reply(found.shape())


async def show(request: web.Request) -> web.Response:
    """Shows the last verdict on all of the books and this gateway's on what ended since its start, and how far each gateway's journal is posted."""
    async with reading(request) as conn:
        places = await request_postings.journal_offsets(conn)
    shipper = request.app[METERING].shipper
    return reply(
        {
            "object": "books",
            "watched": request.app[BOOKKEEPING].watched,
            "verified": await last_verdict.last(request.app[REDIS]),
            "journals": [
                {"slot": place.slot, "posted_seq": place.offset, "posted_at": place.posted_at_ms // 1000}
                for place in places
            ],
            "this_gateway": {"num_unshipped": shipper.num_unshipped, "lag_s": round(shipper.lag_s, 3)},
        }
    )


ROUTES = [Route("POST", "/admin/v1/verify-books", create, "admin"), Route("GET", "/admin/v1/books", show, "admin")]
