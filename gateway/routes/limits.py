"""`GET /v1/me/limits`: every limit and budget that binds the calling key, with the amount that counts
against it now. For the operator: those that bind all keys of a tenant, and what other limits would have refused.
"""

from __future__ import annotations

from aiohttp import web

from accounting.access import principals
from accounting.limits import limit_preview
from accounting.prices import prices
from accounting.tenants import tenants
from accounting.values import clock
from accounting.values.types import Principal, Tier
from gateway.base import errors
from gateway.base.redis_link import LimiterUnavailable
from gateway.generation.models import MODELS
from gateway.generation.stream import GENERATION
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading
from gateway.limiter.limit_replies import shown
from gateway.limiter.rules import everything_of
from gateway.routes import admin
from gateway.routes.admin import route
from gateway.schema import tenants as shapes
from gateway.schema.organization import reply

PATH = "/admin/v1/tenants/{tenant_id}/limits"


async def me(request: web.Request) -> web.Response:
    """Shows the limits that bind the key, and what is left of them."""
    return await _in_force(request, request[PRINCIPAL])


async def of_tenant(request: web.Request) -> web.Response:
    """Lists the limits and budgets that bind every key of the tenant; those of single keys are left out."""
    async with reading(request) as conn:
        tenant = await tenants.get(conn, admin.part(request, "tenant_id"))
        principal = await principals.of_tenant(conn, tenant.id)
    return await _in_force(request, principal)


async def preview(request: web.Request) -> web.Response:
    """Says which requests of the last 7 days these limits would have refused."""
    fields = await admin.fields(request, shapes.LimitsToTry)
    limits = fields.limits
    async with reading(request) as conn:
        tenant = await tenants.get(conn, admin.part(request, "tenant_id"))
        found = await limit_preview.preview(conn, tenant.id, limits, admin.now(), fields.model)
    return reply(shapes.limit_preview(tenant.id, fields, found))


async def _in_force(request: web.Request, principal: Principal) -> web.Response:
    tiers: tuple[Tier, ...] = ("batch",) if principal.kind == "batch" else ("interactive", "batch")
    models = {model.on_workers for model in request.app[MODELS].visible(principal)}
    now_ms = clock.now_ms()
    try:
        holder, names = everything_of(principal, sorted(models), tiers, now_ms)
        peek = await request.app[GENERATION].admission.limiter.peek(holder)
    except LimiterUnavailable as reason:
        raise errors.unavailable("limiter_unavailable", "Limits cannot be read right now.") from reason
    found = shown(holder, peek, names, principal.time_zone)
    if holder.budgets:
        async with reading(request) as conn:
            currency = (await prices.currencies(conn, [principal.tenant_id], now_ms))[principal.tenant_id]
        found = [one | {"currency": currency} if "budget" in one else one for one in found]
    return reply({"object": "list", "data": found, "as_of": now_ms // 1000})


ROUTES = [
    Route("GET", "/v1/me/limits", me, "any"),
    route("GET", PATH, of_tenant),
    route("POST", f"{PATH}/preview", preview, shapes.LimitsToTry),
]
