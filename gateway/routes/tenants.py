"""`/admin/v1/tenants`: a tenant's limits, its share of a busy worker, its suspension, and its deletion. Operator keys
only.
"""

from __future__ import annotations

from aiohttp import web
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import audit
from accounting.lifecycle import erasure, tenant_status
from accounting.prices import prices
from accounting.tenants import tenants
from accounting.values import clock
from gateway.base.app_keys import DATABASE, SETTINGS
from gateway.generation.stream import GENERATION
from gateway.http.sql import reading, translated, writing
from gateway.routes import admin
from gateway.routes.admin import route
from gateway.schema import query
from gateway.schema import tenants as shapes
from gateway.schema.organization import page_of, reply
from workers.protocol.messages import CacheCommand

PATH = "/admin/v1/tenants/{tenant_id}"
FLOOR_PERCENT = 60
"""The most that all floors may sum to, in percent of the smallest worker's blocks."""


async def list_all(request: web.Request) -> web.Response:
    """Lists the tenants."""
    async with reading(request) as conn:
        page = await tenants.list_tenants(
            conn,
            **query.page(request.query),
            include_archived=query.boolean(request.query, "include_archived") or False,
        )
        currencies = await prices.currencies(conn, [one.id for one in page.items], clock.now_ms())
    return reply(page_of(page, lambda one: shapes.tenant(one, currencies[one.id])))


async def get(request: web.Request) -> web.Response:
    """Shows a tenant."""
    async with reading(request) as conn:
        return await _reply(conn, request.match_info["tenant_id"])


async def change(request: web.Request) -> web.Response:
    """Changes a tenant."""
    body = await admin.json_object(request)
    tenant_id, actor, now = admin.part(request, "tenant_id"), admin.actor(request), admin.now()
    async with writing(request) as conn:
        wanted = shapes.wanted(body, await tenants.living(conn, tenant_id))
        if wanted.shares is not None:
            await tenants.set_shares(
                conn, tenant_id, *wanted.shares, floor_limit=_floor_limit(request), now=now, actor=actor
            )
        if wanted.limits is not None:
            await tenants.set_limits(conn, tenant_id, wanted.limits, now=now, actor=actor)
        if wanted.time_zone is not None:
            await tenants.set_time_zone(conn, tenant_id, wanted.time_zone, now=now, actor=actor)
        if wanted.stores_responses is not None:
            await tenants.set_stores_responses(conn, tenant_id, wanted.stores_responses, now=now, actor=actor)
        if wanted.buys_overflow is not None:
            await tenants.set_buys_overflow(conn, tenant_id, wanted.buys_overflow, now=now, actor=actor)
        if wanted.suspended is not None:
            ends = admin.ends_streams(request)
            await tenant_status.suspend(conn, tenant_id, wanted.suspended, now=now, end_streams=ends, actor=actor)
        return await _reply(conn, tenant_id)


async def _reply(conn: AsyncConnection, tenant_id: str) -> web.Response:
    found = await tenants.get(conn, tenant_id)
    return reply(shapes.tenant(found, await prices.currency_of_tenant(conn, tenant_id, clock.now_ms())))


async def delete(request: web.Request) -> web.Response:
    """Deletes a tenant that was archived long enough ago; the answer reports the data that can no longer be read."""
    tenant_id = admin.part(request, "tenant_id")
    who, retention_days = admin.who(request), request.app[SETTINGS].retention_days
    with translated():
        await erasure.delete_request_log(
            request.app[DATABASE], tenant_id, retention_days=retention_days, now=who["now"]
        )
    async with writing(request) as conn:
        report = await erasure.erase(conn, tenant_id, retention_days=retention_days, **who)
    purge(request.app, tenant_id)
    return reply(shapes.erased(report))


async def purge_cache(request: web.Request) -> web.Response:
    """Purges the tenant's cache on every linked worker; earlier messages to the worker are handled first."""
    async with writing(request, changes_identities=False) as conn:
        tenant = await tenants.get(conn, admin.part(request, "tenant_id"))
        await audit.record(
            conn, "headgate.cache.purged", **admin.who(request), tenant_id=tenant.id, object_id=tenant.id
        )
    num_workers = purge(request.app, tenant.id)
    return reply({"id": tenant.id, "object": "tenant.cache.purged", "num_workers": num_workers})


def purge(app: web.Application, tenant_id: str) -> int:
    """Sends the purge to every linked worker. Returns the number of these workers."""
    links = app[GENERATION].fleet.links
    for link in links:
        link.send(CacheCommand("drop", tenant=tenant_id))
    return len(links)


def _floor_limit(request: web.Request) -> int | None:
    """Returns the limit in blocks; None if there is no worker."""
    hellos = [link.hello for link in request.app[GENERATION].fleet.links]
    pools = [hello.num_blocks - 1 for hello in hellos if hello is not None]
    return min(pools) * FLOOR_PERCENT // 100 if pools else None


ROUTES = [
    route("GET", "/admin/v1/tenants", list_all),
    route("GET", PATH, get),
    route("PATCH", PATH, change, shapes.TenantChanges),
    route("DELETE", PATH, delete),
    route("POST", f"{PATH}/purge-cache", purge_cache),
]
