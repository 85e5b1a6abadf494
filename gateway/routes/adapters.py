"""`/admin/v1/adapters`: LoRA adapters that clients name as `model:adapter`. Operator keys only."""

from __future__ import annotations

import asyncio
import time

from aiohttp import web

from accounting.tenants import adapters
from accounting.tenants.adapters import AdapterInfo
from gateway.base import errors
from gateway.generation.served.adapters import ADAPTERS
from gateway.generation.served.models import MODELS
from gateway.generation.stream import GENERATION
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading, writing
from gateway.routes import common
from gateway.schema import adapters as shapes
from gateway.schema import query
from gateway.schema.convert import convert
from gateway.schema.organization import deleted, page_of, reply

PATH = "/admin/v1/adapters"
LOAD_S = 20.0
"""The longest time that a registration waits for the workers' reports."""
LOOK_S = 0.05


async def create(request: web.Request) -> web.Response:
    """Registers an adapter once a worker has loaded it.

    If every worker refuses it, the answer is a 400 with the reason, and the adapter is not registered.
    """
    fields = convert(await common.stored_object(request), shapes.NewAdapter)
    model = request.app[MODELS].base(fields.model)
    actor = request[PRINCIPAL].key_id
    async with writing(request, changes_identities=False) as conn:
        now = int(time.time())
        info = await adapters.create(
            conn, model=model.id, name=fields.name, path=fields.path, tenant_id=fields.tenant, now=now, actor=actor
        )
        infos = await adapters.known(conn, now)
    request.app[ADAPTERS].replace(infos)
    await _heard(request, info)
    states = request.app[ADAPTERS].states(info)
    if states and all(one.state == "failed" for one in states.values()):
        await _end(request, info.id)
        reason = next(iter(states.values())).reason
        raise errors.invalid(f"No worker can load it: {reason}", "path", "adapter_not_usable")
    return reply(shapes.adapter(info, states))


async def list_all(request: web.Request) -> web.Response:
    """Lists the adapters."""
    async with reading(request) as conn:
        page = await adapters.list_adapters(conn, **query.page(request.query))
    keeper = request.app[ADAPTERS]
    return reply(page_of(page, lambda info: shapes.adapter(info, keeper.states(info))))


async def get(request: web.Request) -> web.Response:
    """Shows an adapter."""
    async with reading(request) as conn:
        info = await adapters.get(conn, request.match_info["adapter_id"])
    return reply(shapes.adapter(info, request.app[ADAPTERS].states(info)))


async def delete(request: web.Request) -> web.Response:
    """Deletes an adapter."""
    adapter_id = request.match_info["adapter_id"]
    await _end(request, adapter_id)
    return reply(deleted(adapter_id, "adapter"))


async def _end(request: web.Request, adapter_id: str) -> None:
    """Ends an adapter: no new request gets it; requests that run with it end first."""
    async with writing(request, changes_identities=False) as conn:
        now = int(time.time())
        await adapters.delete(conn, adapter_id, now=now, actor=request[PRINCIPAL].key_id)
        infos = await adapters.known(conn, now)
    request.app[ADAPTERS].replace(infos)
    request.app[ADAPTERS].look(request.app[GENERATION].fleet.links)


async def _heard(request: web.Request, info: AdapterInfo) -> None:
    keeper, deadline = request.app[ADAPTERS], time.monotonic() + LOAD_S
    while time.monotonic() < deadline:
        keeper.look(request.app[GENERATION].fleet.links)
        if all(one.state in ("loaded", "failed") for one in keeper.states(info).values()):
            return
        await asyncio.sleep(LOOK_S)


ROUTES = [
    Route("POST", PATH, create, "admin", takes=shapes.NewAdapter),
    Route("GET", PATH, list_all, "admin"),
    Route("GET", f"{PATH}/{{adapter_id}}", get, "admin"),
    Route("DELETE", f"{PATH}/{{adapter_id}}", delete, "admin"),
]
