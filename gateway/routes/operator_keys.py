"""`/v1/organization/admin_api_keys`: the operator's own keys. Such a key may do everything, or with the scope
`admin:read` alone read everything and change nothing.
"""

from __future__ import annotations

from aiohttp import web

from accounting.access import api_keys
from accounting.values.types import OPERATOR_TENANT
from gateway.base.app_keys import PEPPER
from gateway.http.sql import reading, writing
from gateway.routes import admin
from gateway.routes.admin import route
from gateway.schema import organization as shapes
from gateway.schema import query
from gateway.schema.organization import reply

KEYS = "/v1/organization/admin_api_keys"
KEY = KEYS + "/{key_id}"


async def create(request: web.Request) -> web.Response:
    """Creates an operator's key; only this answer has the key itself."""
    fields = await admin.fields(request, shapes.NewAdminKey)
    async with writing(request) as conn:
        key = await api_keys.create(
            conn,
            request.app[PEPPER],
            tenant_id=OPERATOR_TENANT,
            kind="admin",
            now=admin.now(),
            name=fields.name,
            scopes=fields.scopes,
            expires_at=admin.expiry(fields.expires_in_seconds),
            actor=admin.actor(request),
        )
    return reply(shapes.admin_key(key.info) | {"value": key.value})


async def list_keys(request: web.Request) -> web.Response:
    """Lists the operators' keys."""
    async with reading(request) as conn:
        page = await api_keys.list_keys(
            conn,
            OPERATOR_TENANT,
            **query.page(request.query),
            oldest_first=query.choice(request.query, "order", ("asc", "desc")) == "asc",
        )
    return reply(shapes.page_of(page, shapes.admin_key))


async def get(request: web.Request) -> web.Response:
    """Shows an operator's key, without its secret."""
    async with reading(request) as conn:
        key = await api_keys.get(conn, OPERATOR_TENANT, admin.part(request, "key_id"))
    return reply(shapes.admin_key(key))


async def delete(request: web.Request) -> web.Response:
    """Revokes an operator's key."""
    key_id = admin.part(request, "key_id")
    async with writing(request) as conn:
        await api_keys.revoke(conn, OPERATOR_TENANT, key_id, **admin.who(request))
    return reply(shapes.deleted(key_id, "organization.admin_api_key"))


ROUTES = [
    route("POST", KEYS, create, shapes.NewAdminKey),
    route("GET", KEYS, list_keys),
    route("GET", KEY, get),
    route("DELETE", KEY, delete),
]
