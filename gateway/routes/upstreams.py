"""`/admin/v1/upstreams`: the servers of others that answer for models. Operator keys only: no tenant names an address."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web

from accounting.prices import price_lists
from accounting.prices.prices import DEFAULT_SHEET
from accounting.upstreams import calls, costs, upstreams
from accounting.values import clock
from gateway.base import errors
from gateway.base.app_keys import SETTINGS, UPSTREAM_KEY
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading, translated, writing
from gateway.routes import common
from gateway.schema import prices as price_shapes
from gateway.schema import upstream_costs
from gateway.schema import upstreams as shapes
from gateway.schema.convert import convert
from gateway.schema.organization import deleted, reply
from gateway.upstreams import exchange
from gateway.upstreams.market import MARKET, Market
from gateway.upstreams.place import Place
from gateway.upstreams.serving import SERVE_UPSTREAMS
from gateway.upstreams.wires import kinds

PATH = "/admin/v1/upstreams"
DAYS_MS = 30 * 86_400_000


async def create(request: web.Request) -> web.Response:
    """Declares an upstream.

    `unpriced` lists those of its models that the default price sheet has no price for.
    """
    value = await common.stored_object(request)
    shapes.check_names(value)
    fields = convert(value, shapes.NewUpstream)
    with translated():
        source = shapes.source_of(fields)
    if fields.name in request.app[SETTINGS].upstreams:
        raise errors.conflict("The settings declare an upstream of this name.")
    async with writing(request, changes_identities=False) as conn:
        await upstreams.add(
            conn,
            fields.name,
            source.model_dump(mode="json", exclude_defaults=True) | {"kind": source.kind},
            fields.credential,
            key=request.app[UPSTREAM_KEY],
            now=int(time.time()),
            actor=request[PRINCIPAL].key_id,
            cost_credential=fields.cost_credential,
        )
    await request.app[SERVE_UPSTREAMS]()
    async with reading(request) as conn:
        standard = await price_lists.at(conn, DEFAULT_SHEET, clock.now_ms())
    gaps = price_lists.unpriced(standard, source.models)
    return reply(_shape(place_of(request, fields.name)) | price_shapes.unpriced(gaps))


async def list_all(request: web.Request) -> web.Response:
    """Lists the upstreams."""
    found = [_shape(place) for _, place in sorted(request.app[MARKET].places.items())]
    return reply({"object": "list", "data": found, "has_more": False})


async def get(request: web.Request) -> web.Response:
    """Shows an upstream."""
    place = place_of(request, request.match_info["upstream"])
    name = place.upstream.name
    async with reading(request) as conn:
        bought = [one for one in await calls.sums(conn, clock.now_ms() - DAYS_MS) if one.upstream == name]
        billed = [one for one in await costs.sums(conn) if one.upstream == name]
    bill = upstream_costs.bill(billed[0]) if billed else None
    return reply(_shape(place) | {"usage": shapes.usage(bought), "bill": bill})


async def delete(request: web.Request) -> web.Response:
    """Removes an upstream."""
    name = request.match_info["upstream"]
    if name in request.app[SETTINGS].upstreams:
        raise errors.conflict("The settings declare this upstream: take it out of headgate.toml.")
    async with writing(request, changes_identities=False) as conn:
        await upstreams.remove(conn, name, now=int(time.time()), actor=request[PRINCIPAL].key_id)
    await request.app[SERVE_UPSTREAMS]()
    return reply(deleted(name, "upstream"))


async def check(request: web.Request) -> web.Response:
    """Asks the upstream for its models, which costs nothing and shows whether address and credential are right."""
    place = place_of(request, request.match_info["upstream"])
    upstream = place.upstream
    began = time.monotonic()
    fault = await exchange.probe(request.app[MARKET].session, kinds.of(upstream.source.kind), upstream)
    return reply(
        {
            "id": upstream.name,
            "object": "upstream.check",
            "ok": fault is None,
            "reason": None if fault is None else fault.reason,
            "took_ms": round(1000 * (time.monotonic() - began)),
            "breaker": place.state,
        }
    )


def place_of(request: web.Request, name: str) -> Place:
    """Returns the upstream in force. Raises `ApiError` 404."""
    market: Market = request.app[MARKET]
    if name not in market.places:
        raise errors.not_found("There is no such upstream.")
    return market.places[name]


def _shape(place: Place) -> dict[str, Any]:
    upstream = place.upstream
    now = {
        "breaker": place.state,
        "breaker_reason": place.worst.reason if place.state != "closed" else None,
        "wait_ms": round(1000 * place.longest_wait_s),
        "running": place.num_running,
        "max_running": upstream.source.max_running,
        "first_token_ms": round(1000 * place.first_token_s) or None,
        "attempts": dict(place.attempts),
    }
    return shapes.upstream(
        upstream.name,
        upstream.source,
        now,
        is_stored=upstream.is_stored,
        has_credential=bool(upstream.credential),
        has_cost_credential=bool(upstream.cost_credential),
    )


ROUTES = [
    Route("POST", PATH, create, "admin", takes=shapes.NewUpstream),
    Route("GET", PATH, list_all, "admin"),
    Route("GET", f"{PATH}/{{upstream}}", get, "admin"),
    Route("DELETE", f"{PATH}/{{upstream}}", delete, "admin"),
    Route("POST", f"{PATH}/{{upstream}}/check", check, "admin"),
]
