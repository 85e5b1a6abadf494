"""`/admin/v1/invoices`, `/admin/v1/credits` and `/admin/v1/exports/focus`: closed periods, credits, prepaid grants, and
rows for other programs. A tenant reads its own invoices and credits at `/v1/invoices` and `/v1/credits`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from accounting.billing import credits, invoices
from accounting.exports import csv_text, focus
from accounting.terms import profiles
from accounting.values import clock, periods
from accounting.values.errors import KeyReusedError
from gateway.base import errors
from gateway.base.app_keys import DATABASE
from gateway.billing.einvoice import IncompleteError
from gateway.billing.render import RENDERERS
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading, translated, writing
from gateway.routes import common, downloads
from gateway.routes.admin import only_of
from gateway.schema import invoices as shapes
from gateway.schema import query
from gateway.schema.convert import convert
from gateway.schema.organization import listing, page_of, reply

INVOICES, CREDITS = "/admin/v1/invoices", "/admin/v1/credits"
OWN_INVOICES, OWN_CREDITS = "/v1/invoices", "/v1/credits"
FOCUS = "/admin/v1/exports/focus"
JSON = "application/json"
KINDS = {"json": JSON} | {kind.rpartition("/")[2]: kind for kind in RENDERERS}
MAX_KEY_CHARS = 255


async def close(request: web.Request) -> web.Response:
    """Closes the period of one tenant, or of every tenant that is due for an invoice of it.

    Each is closed once. Of all, `refused` names those that cannot be closed, and why.
    """
    wanted = convert(await common.stored_object(request), shapes.NewInvoice)
    if wanted.project_id is not None:
        return reply(shapes.invoice(await _close(request, wanted.project_id, wanted.period)))
    async with reading(request) as conn:
        invoices.refuse_early(wanted.period, clock.now_ms())  # refused also if no tenant has anything due
        due = await invoices.due_tenants(conn, wanted.period)
    made, refused = [], []
    for tenant_id in due:
        try:
            made.append(shapes.invoice(await _close(request, tenant_id, wanted.period)))
        except errors.ApiError as error:
            if error.status != 409:
                raise
            refused.append({"project_id": tenant_id, "message": error.message})
    return reply(listing(made, has_more=False) | {"refused": refused})


async def list_all(request: web.Request) -> web.Response:
    """Lists the invoices."""
    asked = request.query
    query.refuse_unknown(asked, {"after", "limit", "project_id", "period"})
    limit = query.limit(asked, 20, 100)
    async with reading(request) as conn:
        page = await invoices.list_invoices(
            conn,
            tenant_id=only_of(request) or query.text(asked, "project_id"),
            period=query.text(asked, "period"),
            after=query.text(asked, "after"),
            limit=limit,
        )
    return reply(page_of(page, shapes.invoice))


async def get(request: web.Request) -> web.Response:
    """Shows an invoice: JSON, CSV, HTML, PDF or the XML of EN 16931 by `?format=` or by the header Accept."""
    query.refuse_unknown(request.query, {"format"})
    kind = wanted_type(request)
    async with reading(request) as conn:
        found = await invoices.get(conn, request.match_info["number"], only_of(request))
        picture = await profiles.logo(conn, found.terms.issuer.logo)
    return await answer_as(kind, found, picture)


def wanted_type(request: web.Request) -> str:
    wanted = query.choice(request.query, "format", tuple(KINDS))
    return _kind(request.headers.get("accept", "*/*")) if wanted is None else KINDS[wanted]


async def answer_as(kind: str, found: invoices.InvoiceInfo, logo: bytes | None) -> web.Response:
    if kind == JSON:
        return reply(shapes.invoice(found))
    try:
        content = await asyncio.to_thread(RENDERERS[kind], found, logo)
    except IncompleteError as error:
        raise errors.ApiError(409, str(error), code="invoice_incomplete") from None
    name = f"{found.number}.{kind.rpartition('/')[2]}"
    headers = {
        "content-disposition": f'{"inline" if kind == "text/html" else "attachment"}; filename="{name}"',
        # The page needs its own style and nothing else.
        "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    }
    charset = None if kind == "application/pdf" else "utf-8"
    return web.Response(body=content, content_type=kind, charset=charset, headers=headers)


async def give_credit(request: web.Request) -> web.Response:
    """Gives a tenant a credit."""
    key = request.headers.get("idempotency-key", "")
    if not 0 < len(key) <= MAX_KEY_CHARS:
        raise errors.invalid(
            f"An Idempotency-Key header of 1 to {MAX_KEY_CHARS} characters is required here.",
            code="idempotency_key_required",
        )
    wanted = convert(await common.stored_object(request), shapes.CreditFields).wanted()
    try:
        async with writing(request, changes_identities=False) as conn:
            made, is_replay = await credits.create(
                conn, wanted, key=key, now_ms=clock.now_ms(), actor=request[PRINCIPAL].key_id
            )
    except KeyReusedError as error:
        raise errors.ApiError(422, str(error), code="idempotency_mismatch") from None
    answer = reply(shapes.credit(made))
    if is_replay:
        answer.headers["idempotent-replayed"] = "true"
    return answer


async def list_credits(request: web.Request) -> web.Response:
    """Lists the credits."""
    asked = request.query
    query.refuse_unknown(asked, {"after", "limit", "project_id"})
    limit = query.limit(asked, 20, 100)
    async with reading(request) as conn:
        page = await credits.list_credits(
            conn,
            tenant_id=only_of(request) or query.text(asked, "project_id"),
            after=query.text(asked, "after"),
            limit=limit,
        )
    return reply(page_of(page, shapes.credit))


async def export_focus(request: web.Request) -> web.StreamResponse:
    """Exports a month in the format FOCUS 1.2, as CSV."""
    query.refuse_unknown(request.query, {"period"})
    with translated():
        start, end = periods.bounds(query.text(request.query, "period") or "")
    pages = focus.rows(request.app[DATABASE], start, end)
    name = f"focus-{periods.period_of(start)}.csv"
    response = web.StreamResponse(
        headers={"content-type": "text/csv; charset=utf-8", "content-disposition": f'attachment; filename="{name}"'}
    )
    # The first page is read before the head leaves, so that a database that does not answer is an error and no file.
    with translated():
        first = [*await anext(pages, ())]
    await response.prepare(request)
    await _send_lines(request, response, [focus.COLUMNS, *first])
    async for page in pages:
        await _send_lines(request, response, page)
    await response.write_eof()
    return response


async def _send_lines(request: web.Request, response: web.StreamResponse, rows: Sequence[Sequence[Any]]) -> None:
    await downloads.send(request, response, (await asyncio.to_thread(csv_text.lines, rows)).encode())


async def _close(request: web.Request, tenant_id: str, period: str) -> invoices.InvoiceInfo:
    with translated():
        return await invoices.close(
            request.app[DATABASE], tenant_id, period, now_ms=clock.now_ms(), actor=request[PRINCIPAL].key_id
        )


def _kind(accept: str) -> str:
    """Returns the first known type of the header, whatever its weight. Raises `ApiError` 406."""
    for part in accept.split(","):
        asked = part.partition(";")[0].strip().lower()
        if asked in (JSON, "*/*", "application/*", ""):
            return JSON
        if asked in RENDERERS:
            return asked
    raise errors.ApiError(406, f"An invoice is {JSON}, {', '.join(RENDERERS)}.", code="not_acceptable")


ROUTES = [
    Route("POST", INVOICES, close, "admin", takes=shapes.NewInvoice),
    Route("GET", INVOICES, list_all, "admin"),
    Route("GET", INVOICES + "/{number}", get, "admin"),
    Route("POST", CREDITS, give_credit, "admin", takes=shapes.CreditFields),
    Route("GET", CREDITS, list_credits, "admin"),
    Route("GET", FOCUS, export_focus, "admin"),
    Route("GET", OWN_INVOICES, list_all, "usage:read"),
    Route("GET", OWN_INVOICES + "/{number}", get, "usage:read"),
    Route("GET", OWN_CREDITS, list_credits, "usage:read"),
]
