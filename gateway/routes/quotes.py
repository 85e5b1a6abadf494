"""`POST /v1/quotes`: the cost of a request, without running it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from aiohttp import web

from gateway.base import errors
from gateway.generation import quotes
from gateway.generation.reply import AnswerPlan
from gateway.generation.vectors import VectorPlan
from gateway.http.auth import PRINCIPAL
from gateway.http.route_table import Route
from gateway.routes import chat, common, completions, embeddings, messages, responses
from gateway.schema.convert import OwnBody

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"]
PLANS: dict[Endpoint, Callable[..., Awaitable[AnswerPlan | VectorPlan]]] = {
    "/v1/chat/completions": chat.plan,
    "/v1/completions": completions.plan,
    "/v1/embeddings": embeddings.plan,
    "/v1/messages": messages.plan,
    "/v1/responses": responses.plan,
}


SCOPES = {"/v1/embeddings": "embeddings"}
"""The scopes of the endpoints that a quote may be for. It is `chat` for those that are not named."""


class QuoteFields(OwnBody, frozen=True):
    endpoint: Endpoint
    body: dict[str, Any]


async def create(request: web.Request) -> web.Response:
    """Quotes the price of a request before it is sent."""
    fields = await common.fields_of(request, QuoteFields)
    if SCOPES.get(fields.endpoint, "chat") not in request[PRINCIPAL].scopes:
        raise errors.forbidden("insufficient_scope", "This key may not use the quoted endpoint.")
    plan = await PLANS[fields.endpoint](request, fields.body)
    headers = await common.count(request, plan.orders[0].model)
    known_by = await common.fingerprint_of(request, fields.endpoint, fields.body)
    quote = await quotes.make(request, known_by.digest(), plan)
    return web.Response(body=msgspec.json.encode(quote), content_type="application/json", headers=headers)


ROUTES = [Route("POST", "/v1/quotes", create, "any", takes=QuoteFields)]
