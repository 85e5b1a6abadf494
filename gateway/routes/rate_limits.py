"""`/v1/organization/projects/{id}/rate_limits` and `/model_permissions`: a tenant's limits per model, and its allowed
models.
"""

from __future__ import annotations

import msgspec
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.prices import prices
from accounting.tenants import model_permissions, tenants
from accounting.values import clock
from accounting.values.errors import NotFoundError
from accounting.values.tenant_types import ModelLimits
from gateway.http.sql import reading, writing
from gateway.routes import admin
from gateway.routes.admin import PROJECT, route
from gateway.schema import organization as shapes
from gateway.schema import query
from gateway.schema.organization import reply

LIMITS = f"{PROJECT}/rate_limits"
PERMISSIONS = f"{PROJECT}/model_permissions"


async def list_rate_limits(request: web.Request) -> web.Response:
    """Lists the rate limits of a project."""
    after, before = query.text(request.query, "after"), query.text(request.query, "before")
    size = query.limit(request.query, 100, 100)
    async with reading(request) as conn:
        data = [shapes.rate_limit(entry) for entry in await _rate_limits(conn, admin.project(request))]
    data = [
        entry for entry in data if (after is None or entry["id"] > after) and (before is None or entry["id"] < before)
    ]
    # If the caller walks backwards, the page ends at the caller's position.
    page = data[-size:] if before is not None and after is None else data[:size]
    return reply(shapes.listing(page, len(data) > size))


async def update_rate_limit(request: web.Request) -> web.Response:
    """Changes a rate limit of a project."""
    fields = await admin.fields(request, shapes.RateLimitChanges, shapes.RATE_LIMIT_UNSUPPORTED)
    async with writing(request) as conn:
        present = {shapes.RATE_LIMIT_PREFIX + e.model: e for e in await _rate_limits(conn, admin.project(request))}
        entry = present.get(admin.part(request, "rate_limit_id"))
        if entry is None:
            raise NotFoundError("There is no such rate limit.")
        changed = _changed(entry, fields)
        await tenants.set_model_limits(conn, admin.project(request), changed, **admin.who(request))
    return reply(shapes.rate_limit(changed))


async def _rate_limits(conn: AsyncConnection, tenant_id: str) -> list[ModelLimits]:
    """Returns one entry per model that the tenant can be billed for, by name; limits that were never set have the
    defaults.
    """
    await tenants.get(conn, tenant_id)
    present = await tenants.model_limits(conn, tenant_id)
    models = {*present, *await prices.priced_models(conn, tenant_id, clock.now_ms())}
    return [present.get(model, tenants.default_limits(model)) for model in sorted(models)]


def _changed(entry: ModelLimits, fields: shapes.RateLimitChanges) -> ModelLimits:
    limits = {
        "requests_per_minute": fields.max_requests_per_1_minute,
        "tokens_per_minute": fields.max_tokens_per_1_minute,
    }
    given = {name: value for name, value in limits.items() if value is not None}
    backlog = fields.batch_1_day_max_input_tokens
    return ModelLimits(
        entry.model,
        msgspec.structs.replace(entry.limits, **given),
        entry.batch_backlog_tokens if backlog is None else backlog,
    )


async def get_permissions(request: web.Request) -> web.Response:
    """Shows which models a project may use."""
    async with reading(request) as conn:
        await tenants.get(conn, admin.project(request))
        found = await model_permissions.get(conn, admin.project(request))
    return reply(shapes.model_permissions(found))


async def put_permissions(request: web.Request) -> web.Response:
    """Sets which models a project may use."""
    fields = await admin.fields(request, shapes.ModelPermissionFields)
    async with writing(request) as conn:
        await tenants.living(conn, admin.project(request))
        stored = await model_permissions.put(conn, admin.project(request), fields.permissions, **admin.who(request))
    return reply(shapes.model_permissions(stored))


async def delete_permissions(request: web.Request) -> web.Response:
    """Lets a project use every model again."""
    async with writing(request) as conn:
        await tenants.living(conn, admin.project(request))
        await model_permissions.clear(conn, admin.project(request), **admin.who(request))
    return reply({"object": "project.model_permissions.deleted", "deleted": True})


ROUTES = [
    route("GET", LIMITS, list_rate_limits),
    route("POST", f"{LIMITS}/{{rate_limit_id}}", update_rate_limit, shapes.RateLimitChanges),
    route("GET", PERMISSIONS, get_permissions),
    route("POST", PERMISSIONS, put_permissions, shapes.ModelPermissionFields),
    route("DELETE", PERMISSIONS, delete_permissions),
]
