"""`/admin/v1/fairness`: the share of busy workers that tenants were promised and received. Operator keys only.

What was received comes from the sums by minute, so it covers all gateways and workers; a request counts in the minute
of its start, once it has ended. Who waits now is what linked workers report.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from accounting.ledger import rollups
from accounting.requests import request_log_figures
from accounting.tenants import tenants
from accounting.values.types import OPERATOR_TENANT
from gateway.base import errors
from gateway.base.app_keys import SETTINGS
from gateway.generation.stream import GENERATION
from gateway.http.sql import reading
from gateway.routes.admin import now, route
from gateway.schema import fairness as shapes
from gateway.schema import query
from gateway.schema.organization import reply

MAX_TENANTS = 100
MAX_MINUTES = 60


async def show(request: web.Request) -> web.Response:
    """Shows shares, waits and refusals of the last minutes (`?minutes=`, 10 by default) in one tier (`?tier=`)."""
    query.refuse_unknown(request.query, ("minutes", "tier"))
    minutes = query.integer(request.query, "minutes")
    minutes = 10 if minutes is None else minutes
    if not 1 <= minutes <= MAX_MINUTES:
        raise errors.invalid(f"'minutes' must be 1 to {MAX_MINUTES}.", "minutes")
    tier: Any = query.choice(request.query, "tier", ("interactive", "batch")) or "interactive"
    end = now()
    start = rollups.bucket_of("1m", end - (minutes - 1) * 60)
    present = _present(request)
    async with reading(request) as conn:
        used = await rollups.by_tenant(conn, "1m", start, tier=tier, limit=MAX_TENANTS)
        weights = await tenants.weights_of(conn, {one.tenant_id for one in used} | present.keys())
        queued = await request_log_figures.queued(conn, start * 1000, tier)
        refused = await request_log_figures.refused(conn, start * 1000)
    return reply(
        {
            "object": "fairness",
            "gateway": request.app[SETTINGS].slot,
            "start_time": start,
            "end_time": end,
            "tier": tier,
            "tenants": shapes.shares(used, weights, queued, present),
            "refusals": [shapes.refusal(one) for one in refused],
        }
    )


def _present(request: web.Request) -> dict[str, shapes.Present]:
    """Returns who has requests in a worker now, over all workers and both tiers."""
    found: dict[str, shapes.Present] = {}
    for link in request.app[GENERATION].fleet.links:
        for one in link.report.tenants:
            if (one.running or one.waiting) and one.tenant != OPERATOR_TENANT:
                found[one.tenant] = found.get(one.tenant, shapes.Present()).and_also(one)
    return found


ROUTES = [route("GET", "/admin/v1/fairness", show)]
