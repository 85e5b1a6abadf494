"""Helpers that the routes of vectors and scores share: the worker's abilities, the bounds of inputs, the engine's order."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from gateway.base import errors
from gateway.base.app_keys import CACHE_SECRET
from gateway.generation.engine_request import EngineRequest
from gateway.generation.served.models import ServedModel, context_exceeded
from gateway.http.auth import PRINCIPAL
from gateway.routes import common
from gateway.schema.embeddings import VectorFields
from gateway.telemetry.keys import RECORD
from workers.protocol.messages import Hello, PoolingParams

MAX_TOTAL_TOKENS = 300_000
"""The most tokens of all inputs of a request, as OpenAI has it."""
MAX_NUMBERS = 1 << 22
"""The most numbers of an answer: 2,048 vectors of 2,048. As JSON they are about 80 MB."""


def worker_of(request: web.Request, model: ServedModel) -> Hello:
    """Returns what a worker of the model says of itself. Raises `ApiError` 503 if none is linked."""
    found = common.hellos(request, model)
    if not found:
        raise errors.no_worker()
    return found[0]


def check_answer(num_numbers: int, param: str) -> None:
    """Refuses an answer that would be too large before anything is computed. Raises `ApiError` 400."""
    if num_numbers > MAX_NUMBERS:
        raise errors.invalid(
            f"The answer would have {num_numbers:,} numbers, and at most {MAX_NUMBERS:,} are given at once.", param
        )


class Bounds:
    """Collects the inputs of a request, and refuses the first one that is too long or one too many."""

    def __init__(self, limit: int, truncate: int | None) -> None:
        """`limit` is the context. `truncate` is the client's own bound, -1 for the context, None for a refusal."""
        self.cut = None if truncate is None else limit if truncate < 0 else min(limit, truncate)
        self.inputs: list[array[int]] = []
        self._limit = limit
        self._num_tokens = 0

    def add(self, ids: array[int], param: str) -> None:
        """Raises `ApiError` 400."""
        if not ids:
            raise errors.invalid("An input has no tokens.", param)
        if len(ids) > self._limit:
            raise context_exceeded(self._limit, len(ids), 0, param)
        self._num_tokens += len(ids)
        if self._num_tokens > MAX_TOTAL_TOKENS:
            raise errors.invalid(
                f"The inputs have more than {MAX_TOTAL_TOKENS:,} tokens together.",
                param.partition("[")[0],
                "context_length_exceeded",
            )
        self.inputs.append(ids)


def order(
    request: web.Request,
    value: Mapping[str, Any],
    fields: VectorFields,
    model: ServedModel,
    inputs: Sequence[array[int]],
    params: PoolingParams,
    line: tuple[str, int] | None = None,
) -> EngineRequest:
    """Returns the one engine request of all inputs. Nothing of it is read from the public region of the cache."""
    principal = request[PRINCIPAL]
    facts = common.describe(request, value, fields, model, sum(map(len, inputs)), line)
    namespace = common.namespace(request.app[CACHE_SECRET], principal, facts.user, None)
    traceparent = request[RECORD].worker_traceparent
    return EngineRequest.for_vectors(facts, principal, model, inputs, params, namespace, traceparent)
