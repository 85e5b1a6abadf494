"""The request log over HTTP: `/admin/v1/requests` for the operator, `/v1/requests` for a tenant's own."""

from __future__ import annotations

from aiohttp import web

from accounting.requests import request_log
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading
from gateway.routes.admin import part, route
from gateway.schema import query
from gateway.schema import requests as shapes
from gateway.schema.organization import reply


async def list_requests(request: web.Request) -> web.Response:
    """List requests, the newest first, without their timelines."""
    tenant_id = _only_of(request)
    wanted = shapes.filter_of(request.query, tenant_id)
    async with reading(request) as conn:
        found = await request_log.list_requests(
            conn, wanted, after=query.text(request.query, "after"), limit=query.limit(request.query, 20, 100)
        )
    return reply(shapes.page(found, for_operator=tenant_id is None))


async def show(request: web.Request) -> web.Response:
    """Show one request with its timeline."""
    tenant_id = _only_of(request)
    async with reading(request) as conn:
        found = await request_log.get(conn, part(request, "request_id"), tenant_id)
    return reply(shapes.detail(found, for_operator=tenant_id is None))


def _only_of(request: web.Request) -> str | None:
    """Returns the tenant whose requests the caller may see. None stands for all tenants."""
    principal = request[PRINCIPAL]
    return None if principal.kind == "operator" else principal.tenant_id


ROUTES = [
    route("GET", "/admin/v1/requests", list_requests),
    route("GET", "/admin/v1/requests/{request_id}", show),
    Route("GET", "/v1/requests", list_requests, "usage:read"),
    Route("GET", "/v1/requests/{request_id}", show, "usage:read"),
]
