"""`/admin/v1/tenants`: what a tenant gets of a busy worker, and the purge of what it left there. Operator keys only."""

from __future__ import annotations

import time

from aiohttp import web

from accounting import tenants
from gateway.keys import ENGINE, PRINCIPAL
from gateway.routes import common
from gateway.routes.table import Route
from gateway.schema import tenants as shapes
from gateway.schema.organization import reply
from gateway.sql import reading, writing
from workers.protocol.messages import CacheCommand

PATH = "/admin/v1/tenants/{tenant_id}"
FLOOR_PERCENT = 60
"""Of the smallest worker's blocks, what all floors may sum to."""


async def get(request: web.Request) -> web.Response:
    async with reading(request) as conn:
        return reply(shapes.tenant(await tenants.get(conn, request.match_info["tenant_id"])))


async def change(request: web.Request) -> web.Response:
    body = await common.json_object(request)
    tenant_id = request.match_info["tenant_id"]
    async with writing(request) as conn:
        weight, share = shapes.changed(body, await tenants.get(conn, tenant_id))
        after = await tenants.set_shares(
            conn,
            tenant_id,
            weight,
            share,
            floor_limit=_floor_limit(request),
            now=int(time.time()),
            actor=request[PRINCIPAL].key_id,
        )
    return reply(shapes.tenant(after))


async def purge_cache(request: web.Request) -> web.Response:
    """On every linked worker, behind what it was sent before."""
    async with reading(request) as conn:
        tenant = await tenants.get(conn, request.match_info["tenant_id"])
    num_workers = purge(request.app, tenant.id)
    return reply({"id": tenant.id, "object": "tenant.cache.purged", "num_workers": num_workers})


def purge(app: web.Application, tenant_id: str) -> int:
    """The workers that were told."""
    links = app[ENGINE].fleet.links
    for link in links:
        link.send(CacheCommand("drop", tenant=tenant_id))
    return len(links)


def _floor_limit(request: web.Request) -> int | None:
    """In blocks; None without a worker."""
    hellos = [link.hello for link in request.app[ENGINE].fleet.links]
    pools = [hello.num_blocks - 1 for hello in hellos if hello is not None]
    return min(pools) * FLOOR_PERCENT // 100 if pools else None


ROUTES = [
    Route("GET", PATH, get, "admin"),
    Route("PATCH", PATH, change, "admin"),
    Route("POST", f"{PATH}/purge-cache", purge_cache, "admin"),
]
