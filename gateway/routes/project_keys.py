"""`/v1/organization/projects/{id}/api_keys`: a tenant's keys, in OpenAI's shape and never with the secret."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from msgspec import UNSET
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.access import api_keys, service_accounts
from accounting.tenants import tenants
from accounting.values.tenant_types import ApiKeyInfo, KeyChanges
from gateway.http.sql import reading, writing
from gateway.routes import admin
from gateway.routes.admin import PROJECT, route
from gateway.schema import organization as shapes
from gateway.schema import query
from gateway.schema.organization import reply

KEYS = f"{PROJECT}/api_keys"
KEY = KEYS + "/{key_id}"


async def list_keys(request: web.Request) -> web.Response:
    """Lists the keys of a project."""
    access = query.choice(request.query, "owner_project_access", ("active", "inactive", "any"))
    async with reading(request) as conn:
        await tenants.get(conn, admin.project(request))
        page = await api_keys.list_keys(conn, admin.project(request), **query.page(request.query))
        data = [await _with_owner(conn, key) for key in page.items]
    # The owner of a living key always has access: deleting a service account revokes its keys.
    return reply(shapes.listing([], False) if access == "inactive" else shapes.listing(data, page.has_more))


async def get_key(request: web.Request) -> web.Response:
    """Shows a key of a project, without its secret."""
    async with reading(request) as conn:
        key = await api_keys.get(conn, admin.project(request), admin.part(request, "key_id"))
        return reply(await _with_owner(conn, key))


async def update_key(request: web.Request) -> web.Response:
    """Changes a key of a project."""
    fields = await admin.fields(request, shapes.KeyFields)
    async with writing(request) as conn:
        key = await api_keys.change(
            conn, admin.project(request), admin.part(request, "key_id"), _changes(fields), **admin.who(request)
        )
        return reply(await _with_owner(conn, key))


async def delete_key(request: web.Request) -> web.Response:
    """Revokes a key of a project."""
    key_id = admin.part(request, "key_id")
    async with writing(request) as conn:
        await api_keys.revoke(
            conn, admin.project(request), key_id, end_streams=admin.ends_streams(request), **admin.who(request)
        )
    return reply(shapes.deleted(key_id, "organization.project.api_key"))


def _changes(fields: shapes.KeyFields) -> KeyChanges:
    return KeyChanges(
        scopes=UNSET if fields.scopes is None else tuple(fields.scopes),
        expires_at=UNSET if fields.expires_in_seconds is None else admin.now() + fields.expires_in_seconds,
    )


async def _with_owner(conn: AsyncConnection, key: ApiKeyInfo) -> dict[str, Any]:
    owner = None
    if key.service_account_id is not None:
        owner = await service_accounts.get_service_account(conn, key.tenant_id, key.service_account_id)
    return shapes.api_key(key, owner)


ROUTES = [
    route("GET", KEYS, list_keys),
    route("GET", KEY, get_key),
    route("POST", KEY, update_key, shapes.KeyFields),
    route("DELETE", KEY, delete_key),
]
