"""`POST /v1/embeddings`: a vector of each input."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from gateway.base import errors
from gateway.generation.served.models import ServedModel
from gateway.generation.vectors import VectorPlan, answer, embeddings_body
from gateway.http.route_table import Route
from gateway.metering.embedding_models import EMBEDDING_MODELS
from gateway.routes import bought, common, pooling
from gateway.schema import embeddings
from gateway.schema.embeddings import EmbeddingFields
from gateway.telemetry.keys import RECORD
from gateway.text.pairs import cut_text
from workers.protocol.messages import Hello, PoolingParams


async def create(request: web.Request) -> web.StreamResponse:
    """Computes a vector for each input."""
    return await common.answer_once(request, plan, _answer)


async def _answer(request: web.Request, planned: VectorPlan) -> web.StreamResponse:
    try:
        return await answer(request, planned)
    finally:
        request.app[EMBEDDING_MODELS].note(request[RECORD].model)  # the one that is billed


async def plan(request: web.Request, value: dict[str, Any], line: tuple[str, int] | None = None) -> VectorPlan:
    """Returns the plan of the request. Raises `ApiError`."""
    fields, ignored = await common.aside(request, embeddings.read, EmbeddingFields, value)
    model = common.served_model(request, fields.model, "embed")
    if model.is_foreign:
        texts = await common.aside(request, embeddings.inputs, fields, 2**31)
        return await bought.embedding_plan(request, value, fields, ignored, model, texts, line)
    hello = pooling.worker_of(request, model)
    dimensions = _dimensions(fields, hello)
    texts = await common.aside(request, embeddings.inputs, fields, model.tokenizer.vocab_size)
    num_numbers = len(texts) * (dimensions or hello.vector_size)
    pooling.check_answer(num_numbers, "input")
    limit = common.max_len(request, model)
    inputs = await common.in_thread(request, _encode, model, fields, texts, limit)
    params = PoolingParams("embed", tuple(map(len, inputs)), dimensions)
    order = pooling.order(request, value, fields, model, inputs, params, line)
    body = partial(embeddings_body, fields.model, fields.encoding_format)
    return VectorPlan([order], body, num_numbers, ignored, common.work_of(request))


def _dimensions(fields: EmbeddingFields, hello: Hello) -> int:
    """Returns the size to which vectors are cut; 0 for all of it. Raises `ApiError` 400."""
    asked = fields.dimensions
    if asked is None or asked == hello.vector_size:
        return 0
    if asked in hello.dimensions or (hello.any_dimensions and asked < hello.vector_size):
        return asked
    allowed = ", ".join(map(str, (*hello.dimensions, hello.vector_size)))
    if hello.any_dimensions:
        allowed = f"1 to {hello.vector_size}"
    raise errors.invalid(f"This model gives vectors of {allowed} numbers, not of {asked}.", "dimensions")


def _encode(
    model: ServedModel, fields: EmbeddingFields, texts: Sequence[str | array[int]], limit: int
) -> list[array[int]]:
    bounds = pooling.Bounds(limit, fields.truncate_prompt_tokens)
    is_one = len(texts) == 1
    for index, one in enumerate(texts):
        param = "input" if is_one else f"input[{index}]"
        if not isinstance(one, str):
            ids = one if bounds.cut is None else one[: bounds.cut]
        elif bounds.cut is None:
            ids = model.encode_text(one, fields.add_special_tokens, param)
        else:
            ids = cut_text(model.tokenizer, one, bounds.cut, fields.add_special_tokens)
        bounds.add(ids, param)
    return bounds.inputs


ROUTES = [Route("POST", "/v1/embeddings", create, "embeddings", takes=EmbeddingFields)]
