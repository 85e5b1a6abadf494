"""`/admin/v1/upstreams/{upstream}/costs`: what providers bill, compared with what was bought. Operator keys only."""

from __future__ import annotations

from dataclasses import asdict

from aiohttp import web

from accounting.upstreams import cost_days, cost_pulls, costs
from accounting.values import clock
from accounting.values.periods import DAY_S
from gateway.base import errors
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.http.sql import reading, translated, writing
from gateway.routes import common
from gateway.routes.upstreams import PATH, place_of
from gateway.schema import query
from gateway.schema import upstream_costs as shapes
from gateway.schema.organization import reply
from gateway.upstreams.cost_puller import COST_PULLER, PullRunning

NUM_DAYS, MAX_DAYS = 31, 366


async def add(request: web.Request) -> web.Response:
    """Takes rows of the provider's cost report. A row that came already changes nothing."""
    fields = await common.fields_of(request, shapes.NewCosts)
    name = place_of(request, request.match_info["upstream"]).upstream.name
    async with writing(request, changes_identities=False) as conn:
        found = await costs.add(conn, name, fields.values(), clock.now_ms(), request[PRINCIPAL].key_id)
        await costs.judge_again(conn)
        [billed] = [one for one in await costs.sums(conn) if one.upstream == name]
    answer = {"id": name, "object": "upstream.costs", "num_new": found.num_new, "num_known": found.num_known}
    return reply(answer | shapes.bill(billed))


async def show(request: web.Request) -> web.Response:
    """Shows the last days as the provider's cost API tells them, or with `date` every line of one day."""
    query.refuse_unknown(request.query, ("days", "date"))
    upstream = place_of(request, request.match_info["upstream"]).upstream
    num_days, date = query.integer(request.query, "days"), query.text(request.query, "date")
    if num_days is not None and not 1 <= num_days <= MAX_DAYS:
        raise errors.invalid(f"'days' must be 1 to {MAX_DAYS}.", "days")
    day = None if date is None else shapes.day_of(date)
    if date is not None and day is None:
        raise errors.invalid("'date' must be a date, written like 2026-10-31.", "date")
    async with reading(request) as conn:
        if day is not None:
            return reply(shapes.lines(upstream.name, day, await cost_days.lines(conn, upstream.name, day)))
        today = clock.now_ms() // 1000 // DAY_S * DAY_S
        since = max(0, today - (num_days or NUM_DAYS) * DAY_S)
        compared = (await cost_days.compare(conn, [upstream.name], since)).get(upstream.name, [])
        state = (await cost_pulls.states(conn, [upstream.name]))[upstream.name]
        currency, declared = await cost_days.currency(conn), upstream.source.costs is not None
    sums = cost_days.sums(compared)
    return reply(shapes.days(upstream.name, currency, state, compared, sums, is_declared=declared))


async def pull(request: web.Request) -> web.Response:
    """Reads the provider's cost API now."""
    upstream = place_of(request, request.match_info["upstream"]).upstream
    if upstream.source.costs is None:
        raise errors.invalid("No cost API is declared for this upstream (docs/upstreams.md).", "upstream")
    try:
        with translated():
            found = await request.app[COST_PULLER].pull(upstream, request[PRINCIPAL].key_id)
    except PullRunning:
        raise errors.conflict("The costs of this upstream are being read at this moment.") from None
    answer = {"id": upstream.name, "object": "upstream.cost_pull", "ok": not found.fault}
    return reply(answer | asdict(found) | {"fault": found.fault or None})


ROUTES = [
    Route("POST", f"{PATH}/{{upstream}}/costs", add, "admin", takes=shapes.NewCosts),
    Route("GET", f"{PATH}/{{upstream}}/costs", show, "admin"),
    Route("POST", f"{PATH}/{{upstream}}/costs/pull", pull, "admin"),
]
