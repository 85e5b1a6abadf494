"""`POST /v1/rerank` and `/v1/score`: how well pairs of texts go together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from gateway.base import errors, ids
from gateway.generation import quotes
from gateway.generation.served.models import ServedModel
from gateway.generation.vectors import VectorPlan, Vectors, answer, numbers
from gateway.http.route_table import Route
from gateway.idempotency import idempotency
from gateway.routes import common, pooling
from gateway.schema import embeddings
from gateway.schema.embeddings import RerankFields, ScoreFields
from gateway.text import pairs
from gateway.text.pairs import Pair
from gateway.text.tokenizer import count_bytes
from workers.protocol.messages import PoolingParams

Make = Callable[[web.Request, dict[str, Any]], Any]


async def rerank(request: web.Request) -> web.StreamResponse:
    """Orders documents by their relevance to a query."""
    return await _once(request, rerank_plan)


async def score(request: web.Request) -> web.StreamResponse:
    """Scores pairs of texts."""
    return await _once(request, score_plan)


async def _once(request: web.Request, make: Make) -> web.StreamResponse:
    value = await common.known_object(request)
    if common.batch_line(request) is not None:
        raise errors.invalid("A batch has no lines of this endpoint.")
    return await idempotency.once(request, value, None, lambda: _create(request, value, make))


async def _create(request: web.Request, value: dict[str, Any], make: Make) -> web.StreamResponse:
    async with common.unless_overloaded(request, value), quotes.bound(request, await make(request, value)) as bound:
        return await answer(request, bound)


async def rerank_plan(request: web.Request, value: dict[str, Any]) -> VectorPlan:
    """Returns the plan of the request. Raises `ApiError`."""
    fields, ignored = await common.aside(request, embeddings.read, RerankFields, value)
    texts = await common.aside(request, embeddings.documents, fields)
    texts_of = [(fields.query, text) for text in texts]
    body = partial(_ranked, fields, texts)
    return await _plan(request, value, fields, texts_of, "documents", ignored, body)


async def score_plan(request: web.Request, value: dict[str, Any]) -> VectorPlan:
    """Returns the plan of the request. Raises `ApiError`."""
    fields, ignored = await common.aside(request, embeddings.read, ScoreFields, value)
    texts_of = await common.aside(request, embeddings.pairs, fields)
    return await _plan(request, value, fields, texts_of, "text_2", ignored, partial(_scored, fields))


async def _plan(
    request: web.Request,
    value: dict[str, Any],
    fields: RerankFields | ScoreFields,
    texts: Sequence[tuple[str, str]],
    param: str,
    ignored: Sequence[str],
    body: Callable[[Vectors], dict[str, Any]],
) -> VectorPlan:
    model = common.served_model(request, fields.model, "score")
    hello = pooling.worker_of(request, model)
    asks = hello.pairs == "labels"
    if fields.instruction is not None and not asks:
        raise errors.invalid("This model takes no instruction.", "instruction", "unsupported_parameter")
    labels = pairs.labels(model.tokenizer) if asks else ()
    if asks and not labels:
        raise errors.invalid("This model has no single tokens for yes and no.", "model")
    limit = common.max_len(request, model)
    found = await common.in_thread(request, _encode, model, fields, texts, limit, param, asks=asks)
    segments = tuple(pair.segment for pair in found)
    params = PoolingParams(
        "score", tuple(len(pair.ids) for pair in found), segments=segments if any(segments) else (), labels=labels
    )
    order = pooling.order(request, value, fields, model, [pair.ids for pair in found], params)
    return VectorPlan([order], body, len(texts), ignored, common.work_of(request))


def _encode(
    model: ServedModel,
    fields: RerankFields | ScoreFields,
    texts: Sequence[tuple[str, str]],
    limit: int,
    param: str,
    *,
    asks: bool,
) -> list[Pair]:
    bounds = pooling.Bounds(limit, fields.truncate_prompt_tokens)
    instruction = fields.instruction or pairs.DEFAULT_INSTRUCTION
    found: list[Pair] = []
    for index, (first, second) in enumerate(texts):
        where = param if len(texts) == 1 else f"{param}[{index}]"
        if bounds.cut is None:
            model.check_bytes(count_bytes(first) + count_bytes(second), where)
        if asks:
            pair = pairs.question(model.tokenizer, instruction, first, second, bounds.cut)
        else:
            pair = pairs.segments(model.tokenizer, first, second, bounds.cut)
        bounds.add(pair.ids, where)
        found.append(pair)
    return found


def _ranked(fields: RerankFields, texts: Sequence[str], vectors: Vectors) -> dict[str, Any]:
    scores = [numbers(vector)[0] for vector in vectors]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: fields.top_n]
    results: list[dict[str, Any]] = []
    for index in order:
        results.append({"index": index, "relevance_score": scores[index]})
        if fields.return_documents:
            results[-1]["document"] = {"text": texts[index]}
    return {"id": ids.object_id("rerank-"), "model": fields.model, "results": results}


def _scored(fields: ScoreFields, vectors: Vectors) -> dict[str, Any]:
    data = [{"index": i, "object": "score", "score": numbers(vector)[0]} for i, vector in enumerate(vectors)]
    created = int(time.time())
    return {"id": ids.object_id("score-"), "object": "list", "created": created, "model": fields.model, "data": data}


ROUTES = [
    Route("POST", "/v1/rerank", rerank, "embeddings", takes=RerankFields),
    Route("POST", "/v1/score", score, "embeddings", takes=ScoreFields),
]
