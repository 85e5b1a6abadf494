"""`GET /v1/me/limits`: every limit and budget that binds the calling key, with the amount that counts
against it now. Whoever may read a key sees those of that key. For the operator: those that bind all keys of a tenant,
and what other limits would have refused.
"""

from __future__ import annotations

from aiohttp import web

from accounting.access import api_keys, principals
from accounting.limits import limit_preview
from accounting.prices import prices
from accounting.tenants import tenants
from accounting.values import clock
from accounting.values.types import Principal, Tier
from gateway.base import errors
from gateway.base.redis_link import LimiterUnavailable
from gateway.generation.served.models import MODELS
from gateway.generation.stream import GENERATION
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading
from gateway.limiter.limit_replies import shown
from gateway.limiter.rules import everything_of
from gateway.routes import admin, keys
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


async def of_key(request: web.Request) -> web.Response:
    """Lists the limits and budgets that bind a key, its own and those of its tenant."""
    async with reading(request) as conn:
        principal = await principals.of_key(conn, await keys.readable(request, conn))
    return await _in_force(request, principal)


async def preview(request: web.Request) -> web.Response:
    """Says how many requests of the last 7 days these limits, or this budget, would have refused."""
    fields = await admin.fields(request, shapes.LimitsToTry)
    trial = fields.trial(admin.part(request, "tenant_id"))
    async with reading(request) as conn:
        tenant = await tenants.get(conn, admin.part(request, "tenant_id"))
        if trial.key_id is not None:
            await api_keys.get(conn, tenant.id, trial.key_id)
        found = await limit_preview.preview(conn, tenant.id, trial, admin.now())
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
    route("GET", "/admin/v1/keys/{key_id}/limits", of_key),
    route("GET", "/v1/keys/{key_id}/limits", of_key, scope="keys"),
    route("POST", f"{PATH}/preview", preview, shapes.LimitsToTry),
]
