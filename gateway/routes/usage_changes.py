"""Why a charge changed: `/admin/v1/usage/changes` for the operator, `/v1/usage/changes` for a tenant's own."""

from __future__ import annotations

import asyncio

from aiohttp import web

from accounting.comparison import causes, period_sums
from gateway.http.route_table import Route
from gateway.http.sql import reading, translated
from gateway.routes.admin import now, only_of, route
from gateway.schema import usage_changes as shapes
from gateway.schema.organization import reply


async def changes(request: web.Request) -> web.Response:
    """Splits the difference of a tenant's charge between two periods into causes."""
    with translated():
        asked = shapes.asked_of(request.query, only_of(request), now())
    async with reading(request) as conn:
        periods = await period_sums.read(conn, asked.tenant_id, asked.intervals, key_id=asked.key_id, model=asked.model)
    # The split takes a millisecond for each model and tier.
    found = await asyncio.to_thread(causes.change, periods.before, periods.after)
    return reply(shapes.change(asked, periods, found))


ROUTES = [route("GET", "/admin/v1/usage/changes", changes), Route("GET", "/v1/usage/changes", changes, "usage:read")]
