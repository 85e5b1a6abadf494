"""`GET /v1/me/limits`: every limit and budget that binds the calling key, with the amount that counts
against it now.
"""

from __future__ import annotations

from aiohttp import web

from accounting.values import clock
from accounting.values.types import Tier
from gateway.base import errors
from gateway.base.redis_link import LimiterUnavailable
from gateway.generation.models import MODELS
from gateway.generation.stream import GENERATION
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.limiter.limit_replies import shown
from gateway.limiter.rules import everything_of
from gateway.schema.organization import reply


async def me(request: web.Request) -> web.Response:
    principal = request[PRINCIPAL]
    tiers: tuple[Tier, ...] = ("batch",) if principal.kind == "batch" else ("interactive", "batch")
    models = {model.id for model in request.app[MODELS].visible(principal)}
    now_ms = clock.now_ms()
    try:
        holder, names = everything_of(principal, sorted(models), tiers, now_ms)
        peek = await request.app[GENERATION].admission.limiter.peek(holder)
    except LimiterUnavailable as reason:
        raise errors.unavailable("limiter_unavailable", "Limits cannot be read right now.") from reason
    return reply({"object": "list", "data": shown(holder, peek, names, principal.time_zone), "as_of": now_ms // 1000})


ROUTES = [Route("GET", "/v1/me/limits", me, "any")]
