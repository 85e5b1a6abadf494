"""`/v1/organization/projects/{id}/service_accounts`: the holders of a tenant's keys, and the creation of keys."""

from __future__ import annotations

from typing import Any

from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.access import api_keys, service_accounts
from accounting.tenants import tenants
from gateway.base import errors
from gateway.base.app_keys import PEPPER
from gateway.http.sql import reading, writing
from gateway.routes import admin
from gateway.routes.admin import PROJECT, route
from gateway.schema import organization as shapes
from gateway.schema import query
from gateway.schema.organization import reply

ACCOUNTS = f"{PROJECT}/service_accounts"
ACCOUNT = ACCOUNTS + "/{account_id}"


async def create_service_account(request: web.Request) -> web.Response:
    """Creates a service account of a project."""
    fields = await admin.fields(request, shapes.NewServiceAccount)
    with_key = not fields.create_service_account_only
    if not with_key and fields.expires_in_seconds is not None:
        raise errors.invalid("An account without a key has no expiry.", "expires_in_seconds")
    async with writing(request) as conn:
        account = await service_accounts.create_service_account(
            conn, admin.project(request), fields.name, with_key=with_key, **admin.who(request)
        )
        key = None
        if with_key:
            wanted = shapes.NewKey(expires_in_seconds=fields.expires_in_seconds)
            key = await _create_key(request, conn, account.id, wanted)
    return reply({**shapes.service_account(account), "api_key": key})


async def list_service_accounts(request: web.Request) -> web.Response:
    """Lists the service accounts of a project."""
    async with reading(request) as conn:
        await tenants.get(conn, admin.project(request))
        page = await service_accounts.list_service_accounts(conn, admin.project(request), **query.page(request.query))
    return reply(shapes.page_of(page, shapes.service_account))


async def get_service_account(request: web.Request) -> web.Response:
    """Shows a service account."""
    async with reading(request) as conn:
        account = await service_accounts.get_service_account(
            conn, admin.project(request), admin.part(request, "account_id")
        )
    return reply(shapes.service_account(account))


async def update_service_account(request: web.Request) -> web.Response:
    """Changes a service account."""
    fields = await admin.fields(request, shapes.ProjectFields, ("role",))
    async with writing(request) as conn:
        account = await service_accounts.rename_service_account(
            conn, admin.project(request), admin.part(request, "account_id"), fields.name, **admin.who(request)
        )
    return reply(shapes.service_account(account))


async def delete_service_account(request: web.Request) -> web.Response:
    """Deletes a service account."""
    account_id = admin.part(request, "account_id")
    async with writing(request) as conn:
        await service_accounts.delete_service_account(
            conn, admin.project(request), account_id, end_streams=admin.ends_streams(request), **admin.who(request)
        )
    return reply(shapes.deleted(account_id, "organization.project.service_account"))


async def create_key(request: web.Request) -> web.Response:
    """Creates a key of a service account; only this answer has the key itself."""
    fields = await admin.fields(request, shapes.NewKey)
    async with writing(request) as conn:
        await tenants.living(conn, admin.project(request))
        account = await service_accounts.get_service_account(
            conn, admin.project(request), admin.part(request, "account_id")
        )
        key = await _create_key(request, conn, account.id, fields)
    return reply(key)


async def _create_key(
    request: web.Request, conn: AsyncConnection, account_id: str, fields: shapes.NewKey
) -> dict[str, Any]:
    key = await api_keys.create(
        conn,
        request.app[PEPPER],
        tenant_id=admin.project(request),
        now=admin.now(),
        name=fields.name,
        service_account_id=account_id,
        scopes=fields.scopes,
        expires_at=admin.expiry(fields.expires_in_seconds),
        actor=admin.actor(request),
    )
    return shapes.new_key(key)


ROUTES = [
    route("POST", ACCOUNTS, create_service_account, shapes.NewServiceAccount),
    route("GET", ACCOUNTS, list_service_accounts),
    route("GET", ACCOUNT, get_service_account),
    route("POST", ACCOUNT, update_service_account, shapes.ProjectFields),
    route("DELETE", ACCOUNT, delete_service_account),
    route("POST", f"{ACCOUNT}/api_keys", create_key, shapes.NewKey),
]
