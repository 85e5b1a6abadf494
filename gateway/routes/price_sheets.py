"""`/admin/v1/price-sheets`, and the sheet that a tenant pays by. Versions are immutable. Operator keys only."""

from __future__ import annotations

import re
import time
from typing import Any

from aiohttp import web

from accounting.database import auth_epoch
from accounting.prices import previews, price_lists, prices
from accounting.values import clock
from accounting.values.errors import ConflictError, NotFoundError
from gateway.base import errors
from gateway.generation.served.models import MODELS
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading, writing
from gateway.routes import common
from gateway.schema import prices as shapes
from gateway.schema import query
from gateway.schema.convert import convert
from gateway.schema.organization import page_of, reply

PATH = "/admin/v1/price-sheets"
MAX_CHANGE_PERCENT = 100
OF_TENANT = "/admin/v1/tenants/{tenant_id}/price-sheet"


async def create(request: web.Request) -> web.Response:
    """Creates a sheet, or the next version of one.

    Its predecessor, if open, ends where it begins. `unpriced` lists the served models that it has no price for.
    """
    wanted = _checked(convert(await common.stored_object(request), shapes.NewSheetVersion))
    async with writing(request) as conn:
        made = await _create(conn, wanted, int(time.time()), request[PRINCIPAL].key_id)
    gaps = price_lists.unpriced(made, _served(request))
    return reply(shapes.sheet_version(made) | shapes.unpriced(gaps))


async def preview(request: web.Request) -> web.Response:
    """Prices the usage of the last 7 days under the sheet by the rates of a version that is not created."""
    wanted = _checked(convert(await common.stored_object(request), shapes.NewSheetVersion))
    async with reading(request) as conn:
        try:
            currency = await prices.currency_of(conn, wanted.sheet)
        except NotFoundError:
            currency = (wanted.currency or prices.DEFAULT_CURRENCY).upper()
        found = await previews.effects(conn, wanted.sheet, wanted.table(), int(time.time()))
    return reply(shapes.preview(wanted.sheet, currency, found))


async def list_all(request: web.Request) -> web.Response:
    """Lists the price sheets."""
    query.refuse_unknown(request.query, {"after", "limit"})
    after, limit = query.text(request.query, "after"), query.limit(request.query, 20, 100)
    async with reading(request) as conn:
        page = await price_lists.list_versions(conn, after=after, limit=limit)
    return reply(page_of(page, shapes.sheet_version))


async def get(request: web.Request) -> web.Response:
    """Shows a version of a price sheet."""
    sheet, number = _named(request)
    async with reading(request) as conn:
        return reply(shapes.sheet_version(await price_lists.get(conn, sheet, number)))


async def month(request: web.Request) -> web.Response:
    """Prices a month of one tenant, or of each, by the version's rates, changed by `change_percent`; writes nothing."""
    query.refuse_unknown(request.query, {"period", "project_id", "change_percent", "after", "limit"})
    (sheet, number), period = _named(request), query.text(request.query, "period") or ""
    percent = query.integer(request.query, "change_percent") or 0
    if abs(percent) > MAX_CHANGE_PERCENT:
        raise errors.invalid("'change_percent' must be between -100 and 100.", "change_percent")
    asked = {name: query.text(request.query, of) for name, of in (("tenant_id", "project_id"), ("after", "after"))}
    limit = query.limit(request.query, 20, 100)
    async with reading(request) as conn:
        version = await price_lists.get(conn, sheet, number)
        found = await previews.month_by(conn, period, version, percent, limit=limit, **asked)
    return reply(shapes.month_by(period, version, percent, found))


def _named(request: web.Request) -> tuple[str, int]:
    """Returns the sheet and the number of the version that the path names."""
    sheet, number = request.match_info["sheet"], request.match_info["version"]
    if not re.fullmatch(r"[0-9]{1,9}", number):
        raise errors.not_found()
    return sheet, int(number)


async def assign(request: web.Request) -> web.Response:
    """Assigns a sheet; `unpriced` lists the served models without a price in it when the assignment begins."""
    wanted = convert(await common.stored_object(request), shapes.NewAssignment)
    tenant_id = request.match_info["tenant_id"]
    now = int(time.time())
    start = now if wanted.from_ is None else wanted.from_
    until_ms = None if wanted.until is None else wanted.until * 1000
    async with writing(request) as conn:
        if await prices.assign(conn, tenant_id, wanted.sheet, start * 1000, until_ms):
            await auth_epoch.record(
                conn,
                prices.ASSIGNED,
                actor=request[PRINCIPAL].key_id,
                now=now,
                tenant_id=tenant_id,
                object_id=wanted.sheet,
                detail={"from": start, "until": wanted.until},
            )
        intervals = await price_lists.assignments(conn, tenant_id)
        begins_ms = max(start * 1000, clock.now_ms())
        version = await price_lists.at(conn, wanted.sheet, begins_ms)
    gaps = price_lists.unpriced(version, _served(request))
    return reply(shapes.assigned(tenant_id, intervals) | shapes.unpriced(gaps))


def _served(request: web.Request) -> tuple[str, ...]:
    """Returns the models that tenants may ask for: those of our own, and those that upstreams alone answer for."""
    models = request.app[MODELS]
    return models.ids + models.foreign_ids


async def assignments(request: web.Request) -> web.Response:
    """Lists the price sheets that a tenant is assigned, with their times."""
    tenant_id = request.match_info["tenant_id"]
    async with reading(request) as conn:
        return reply(shapes.assigned(tenant_id, await price_lists.assignments(conn, tenant_id)))


def _checked(wanted: shapes.NewSheetVersion) -> shapes.NewSheetVersion:
    """Raises `ApiError` if a model and tier is named twice."""
    if len(wanted.table()) != len(wanted.rates):
        raise errors.invalid("A model and tier has one set of rates.", "rates")
    return wanted


async def _create(conn: Any, wanted: shapes.NewSheetVersion, now: int, actor: str) -> price_lists.SheetVersion:
    await _sheet(conn, wanted, now)
    start = now if wanted.from_ is None else wanted.from_
    price_version = await prices.add_version(
        conn,
        wanted.sheet,
        wanted.table(),
        start * 1000,
        None if wanted.until is None else wanted.until * 1000,
        residency={r.model: (r.cache, r.pinned) for r in wanted.residency},
        now=now,
    )
    await auth_epoch.record(conn, "headgate.price_sheet.version_created", actor=actor, now=now, object_id=price_version)
    return await price_lists.get(conn, *price_lists.split(price_version))


async def _sheet(conn: Any, wanted: shapes.NewSheetVersion, now: int) -> None:
    """Creates the sheet if it is new. Raises ConflictError for another currency."""
    try:
        currency = await prices.currency_of(conn, wanted.sheet)
    except NotFoundError:
        await prices.create_sheet(conn, wanted.sheet, wanted.currency or prices.DEFAULT_CURRENCY, now)
        return
    if wanted.currency is not None and wanted.currency.upper() != currency:
        raise ConflictError(f"The currency of this sheet is {currency}.")


ROUTES = [
    Route("POST", PATH, create, "admin", takes=shapes.NewSheetVersion),
    Route("POST", PATH + "/preview", preview, "admin", takes=shapes.NewSheetVersion),
    Route("GET", PATH, list_all, "admin"),
    Route("GET", PATH + "/{sheet}/{version}", get, "admin"),
    Route("GET", PATH + "/{sheet}/{version}/month", month, "admin"),
    Route("PUT", OF_TENANT, assign, "admin", takes=shapes.NewAssignment),
    Route("GET", OF_TENANT, assignments, "admin"),
]
