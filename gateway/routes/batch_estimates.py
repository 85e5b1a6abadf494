"""`POST /v1/batches/estimate`: what a batch would cost, without submitting it."""

from __future__ import annotations

from aiohttp import web

from gateway.base import errors
from gateway.base.running import one_at_a_time
from gateway.estimates.estimate import estimate
from gateway.generation.stream import GENERATION
from gateway.http import body
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.intake.json_body import decode_stored
from gateway.routes.batches import MAX_BODY_BYTES, SCOPES
from gateway.routes.quotes import PLANS
from gateway.schema.batches import EstimateFields
from gateway.schema.convert import convert
from gateway.schema.organization import reply
from gateway.telemetry.keys import RECORD

ESTIMATING: web.AppKey[set[str]] = web.AppKey("estimating", set)
"""The tenants of which an estimate runs. Each may have one on a gateway at a time."""


async def create(request: web.Request) -> web.Response:
    """Tells the lines, tokens and cost of a batch, and whether it would run now."""
    fields = convert(decode_stored(await body.read(request, MAX_BODY_BYTES)), EstimateFields)
    principal, running = request[PRINCIPAL], request.app[ESTIMATING]
    if SCOPES.get(fields.endpoint, "chat") not in principal.scopes:
        raise errors.forbidden("insufficient_scope", "This key may not use the batch's endpoint.")
    with one_at_a_time(running, principal.tenant_id, "An estimate of your project runs already: one at a time."):
        headers = await request.app[GENERATION].admission.count(request[RECORD].request_id, principal, "")
        answer = reply(await estimate(request, fields, PLANS[fields.endpoint]))
    answer.headers.update(headers)
    return answer


ROUTES = [Route("POST", "/v1/batches/estimate", create, "batch", MAX_BODY_BYTES, takes=EstimateFields)]
