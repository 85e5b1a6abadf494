"""`/admin/v1/keys` for the operator and `/v1/keys` for a tenant's key with the scope `keys`: keys with all their
properties, for some of which OpenAI's shapes have no field; and leaked keys.

A tenant's key manages keys of its own tenant that may do no more than itself (accounting/access/delegation.py). What
results is checked in the transaction that made it.
"""

from __future__ import annotations

from functools import partial

import msgspec
from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.access import api_keys, delegation
from accounting.database import auth_epoch
from accounting.limits import budgets, quotas
from accounting.tenants import tenants
from accounting.values.errors import ConflictError, NotFoundError
from accounting.values.tenant_types import ApiKeyInfo
from gateway.base import errors
from gateway.base.app_keys import PEPPER
from gateway.base.buckets import Buckets
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route, Scope
from gateway.http.sql import reading, writing
from gateway.routes import admin
from gateway.routes.admin import route
from gateway.schema import keys as shapes
from gateway.schema import query
from gateway.schema.organization import deleted, page_of, reply

KEY_CHANGES = web.AppKey("key_changes", Buckets)
"""The changes of keys that each tenant may make: its bucket, on one gateway. Each one makes every process look up every
key in use again."""
KEY_CHANGES_BURST = 60
KEY_CHANGES_PER_S = 1.0
MAX_KEYS = 1_000
"""The most living keys that a tenant's own keys may make it have. The operator may make more."""


async def list_keys(request: web.Request) -> web.Response:
    """Lists keys, without their secrets."""
    principal = request[PRINCIPAL]
    asked = query.text(request.query, "project_id")
    tenant_id = asked or "" if principal.kind == "operator" else principal.tenant_id
    async with reading(request) as conn:
        await tenants.get(conn, tenant_id)
        page = await api_keys.list_keys(conn, tenant_id, **query.page(request.query))
    return reply(page_of(page, shapes.key))


async def get(request: web.Request) -> web.Response:
    """Shows a key, without its secret."""
    async with reading(request) as conn:
        found = await readable(request, conn)
    return reply(shapes.key(found))


async def readable(request: web.Request, conn: AsyncConnection) -> ApiKeyInfo:
    """Returns the key that the path names, if the caller may read it. Raises NotFoundError."""
    found = await api_keys.find(conn, admin.part(request, "key_id"))
    if admin.only_of(request) not in (None, found.tenant_id):
        raise NotFoundError
    return found


async def create(request: web.Request) -> web.Response:
    """Creates a key; only this answer has the key itself."""
    fields = await admin.fields(request, shapes.NewKey)
    _count(request)
    async with writing(request) as conn:
        holder = await unbounded_holder(request, conn)
        tenant_id = fields.project_id if holder is None else holder.tenant_id
        await tenants.living(conn, tenant_id)
        if holder is not None and await api_keys.num_living(conn, tenant_id, admin.now()) >= MAX_KEYS:
            raise ConflictError(f"A project makes itself at most {MAX_KEYS:,} API keys: revoke some.")
        made = await api_keys.create(
            conn,
            request.app[PEPPER],
            tenant_id=tenant_id,
            **admin.who(request),
            **shapes.wanted(fields, admin.now(), holder),
        )
        _check(holder, made.info)
    return reply(shapes.key(made.info) | {"value": made.value})


async def change(request: web.Request) -> web.Response:
    """Changes a key."""
    wanted = shapes.changes(await admin.json_object(request))
    _count(request)
    async with writing(request) as conn:
        holder = await unbounded_holder(request, conn)
        present = await _present(request, conn, holder)
        end_streams = admin.ends_streams(request, default=wanted.disabled is True)
        changed = await api_keys.change(
            conn, present.tenant_id, present.id, wanted, end_streams=end_streams, **admin.who(request)
        )
        _check(holder, changed)
    return reply(shapes.key(changed))


async def rotate(request: web.Request) -> web.Response:
    """Replaces a key by a new one; both work for the overlap that was asked for."""
    fields = await admin.fields(request, shapes.Rotation)
    _count(request)
    async with writing(request) as conn:
        present = await _present(request, conn, await unbounded_holder(request, conn))
        rotated = await api_keys.rotate(
            conn, request.app[PEPPER], present.id, fields.overlap_seconds, **admin.who(request)
        )
    return reply(shapes.key(rotated.info) | {"value": rotated.value})


async def revoke(request: web.Request) -> web.Response:
    """Revokes a key."""
    async with writing(request) as conn:
        present = await _present(request, conn, await _holder(request, conn))
        await api_keys.revoke(
            conn, present.tenant_id, present.id, end_streams=admin.ends_streams(request), **admin.who(request)
        )
    return reply(deleted(present.id, "api_key"))


async def report_leak(request: web.Request) -> web.Response:
    """Revokes a key that was found in public, and ends its requests.

    The answer has the id of the key, or null if no key that works has this value.
    """
    fields = await admin.fields(request, shapes.LeakedKey)
    async with writing(request) as conn:
        ended = await api_keys.revoke_leaked(conn, request.app[PEPPER], fields.value, **admin.who(request))
    return reply({"object": "leaked_key.report", "received": True, "api_key_id": ended})


def _count(request: web.Request) -> None:
    """Counts a change that a tenant's key asks for. Raises `ApiError` 429. Keys may be revoked at any rate."""
    principal, buckets = request[PRINCIPAL], request.app[KEY_CHANGES]
    if principal.kind == "operator":
        return
    if wait_ms := buckets.blocked_ms(principal.tenant_id):
        raise errors.too_many(
            "Keys of this project made too many changes of API keys; to revoke one is not counted.", wait_ms
        )
    buckets.take(principal.tenant_id)


async def _holder(request: web.Request, conn: AsyncConnection) -> ApiKeyInfo | None:
    """Returns the tenant's key that asks, as it is now, with the end of the secret that it asks with. None stands for
    the operator, who may change every key. No key changes from here to the end of the transaction. Raises `ApiError` 401
    for one that was disabled or has expired since it was authenticated: it could enable itself, or make keys that last.
    """
    await auth_epoch.hold(conn)
    principal = request[PRINCIPAL]
    if principal.kind == "operator":
        return None
    found = await api_keys.get(conn, principal.tenant_id, principal.key_id)
    until = min((at for at in (found.expires_at, principal.expires_at) if at is not None), default=None)
    if found.disabled or (until is not None and until <= admin.now()):
        raise errors.unauthorized()
    return msgspec.structs.replace(found, expires_at=until)


async def unbounded_holder(request: web.Request, conn: AsyncConnection) -> ApiKeyInfo | None:
    """Returns the key that asks, as `_holder` does. Raises NotAllowedError if it has limits of its own."""
    holder = await _holder(request, conn)
    if holder is not None:
        own = await budgets.of_tenant(conn, holder.tenant_id), await quotas.of_tenant(conn, holder.tenant_id)
        delegation.check_unbounded(holder, *own)
    return holder


async def _present(request: web.Request, conn: AsyncConnection, holder: ApiKeyInfo | None) -> ApiKeyInfo:
    """Returns the key that the path names. Raises NotFoundError, and NotAllowedError for one that may do more."""
    found = await api_keys.find(conn, admin.part(request, "key_id"))
    if holder is not None and found.tenant_id != holder.tenant_id:
        raise NotFoundError
    _check(holder, found)
    return found


def _check(holder: ApiKeyInfo | None, key: ApiKeyInfo) -> None:
    if holder is not None:
        delegation.check_within(holder, key)


def _routes(root: str, scope: Scope) -> list[Route]:
    key = root + "/{key_id}"
    one = partial(route, scope=scope)
    return [
        one("GET", root, list_keys),
        one("POST", root, create, shapes.NewKey),
        one("GET", key, get),
        one("PATCH", key, change, shapes.KeyPatch),
        one("DELETE", key, revoke),
        one("POST", f"{key}/rotate", rotate, shapes.Rotation),
    ]


ROUTES = [
    *_routes("/admin/v1/keys", "admin"),
    *_routes("/v1/keys", "keys"),
    route("POST", "/admin/v1/leaked-keys", report_leak, shapes.LeakedKey),
]
