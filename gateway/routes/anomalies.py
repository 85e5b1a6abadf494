"""`GET /admin/v1/anomalies` for the operator, `/v1/anomalies` for a tenant's own: keys and end users that are unusual."""

from __future__ import annotations

from aiohttp import web

from accounting.anomalies import anomalies, end_users
from gateway.base import errors
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading
from gateway.routes import admin
from gateway.routes.admin import route
from gateway.schema import anomalies as shapes
from gateway.schema import query
from gateway.schema.organization import listing, reply

DEFAULT_HOURS = 4


async def list_anomalies(request: web.Request) -> web.Response:
    """Lists keys whose last hours differ from their own past."""
    query.refuse_unknown(request.query, ("project_id", "hours"))
    asked = query.integer(request.query, "hours")
    num_hours = DEFAULT_HOURS if asked is None else asked
    if not 1 <= num_hours <= anomalies.MAX_HOURS:
        raise errors.invalid(f"'hours' must be 1 to {anomalies.MAX_HOURS}.", "hours")
    principal = request[PRINCIPAL]
    is_operator = principal.kind == "operator"
    tenant_id = query.text(request.query, "project_id") if is_operator else principal.tenant_id
    now = admin.now()
    async with reading(request) as conn:
        keys = await anomalies.find(conn, now, num_hours, tenant_id)
        users = await end_users.find(conn, now * 1000, tenant_id)
    found = listing([shapes.anomaly(one) for one in keys], False)
    return reply(found | {"end_users": [shapes.of_end_user(one) for one in users], "as_of": now})


ROUTES = [
    route("GET", "/admin/v1/anomalies", list_anomalies),
    Route("GET", "/v1/anomalies", list_anomalies, "usage:read"),
]
