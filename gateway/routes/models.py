"""`GET /v1/models` and `GET /v1/models/{id}`: the models that this key may use, in the shape of the API that asks
(`gateway/http/dialects.py`).
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from accounting.prices.prices import priced_models
from accounting.values import clock
from gateway.base import errors
from gateway.generation.served.models import MODELS, ServedModel
from gateway.generation.stream import GENERATION
from gateway.http.auth import PRINCIPAL
from gateway.http.dialects import speaks_anthropic
from gateway.http.route_table import Route
from gateway.http.sql import reading
from gateway.messages.models import model_info, page
from gateway.routes.common import max_len, tasks_of


async def list_models(request: web.Request) -> web.Response:
    """Lists the models that the key may use."""
    data = [_object(request, model) for model in await _usable(request)]
    if speaks_anthropic(request):
        return web.json_response(page(data, request.query))
    return web.json_response({"object": "list", "data": data})


async def retrieve(request: web.Request) -> web.Response:
    """Shows one model that the key may use."""
    name = request.match_info["id"]
    for model in await _usable(request):
        if name in (model.id, *model.aliases):
            return web.json_response(_object(request, model))
    raise errors.model_not_found()


async def _usable(request: web.Request) -> list[ServedModel]:
    """Returns the models that are visible to the key and have a price."""
    principal = request[PRINCIPAL]
    async with reading(request) as conn:
        priced = await priced_models(conn, principal.tenant_id, clock.now_ms())
    visible = request.app[MODELS].visible(principal)
    return [model for model in visible if model.id in priced or model.base in priced]


def _object(request: web.Request, model: ServedModel) -> dict[str, Any]:
    if speaks_anthropic(request):
        return model_info(model.id, model.created, max_len(request, model), model.max_output_tokens)
    return {
        "id": model.id,
        "object": "model",
        "created": model.created,
        "owned_by": "headgate",
        "max_model_len": max_len(request, model),
        "capabilities": _capabilities(request, model),
        "aliases": list(model.aliases),
        "served_by": "upstream" if model.is_foreign else "workers",
        "overflow": _overflows(request, model),
    }


def _overflows(request: web.Request, model: ServedModel) -> bool:
    """Says whether bought capacity may answer for this tenant where workers would be late."""
    can = model.id in request.app[GENERATION].capacity.market.links and not model.is_foreign
    return can and request[PRINCIPAL].buys_overflow


def _capabilities(request: web.Request, model: ServedModel) -> list[str]:
    """Returns what the model can do: the kinds of text, or what its workers say that it gives in place of text."""
    tasks = tasks_of(request, model)
    if model.is_foreign and "generate" in tasks:
        return ["chat", "completions"]
    return list(model.capabilities if not tasks or "generate" in tasks else tasks)


ROUTES = [Route("GET", "/v1/models", list_models, "any"), Route("GET", "/v1/models/{id:.+}", retrieve, "any")]
