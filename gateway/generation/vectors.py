"""A request for vectors or scores: this module runs it and writes its one body.

All inputs of a request are one request of the engine: admitted once, charged by one ledger entry, and computed with
each other in as many steps as they need.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from aiohttp import web

from gateway.base import errors
from gateway.generation.engine_request import EngineRequest
from gateway.generation.headgate_object import headgate_of
from gateway.generation.reply import Work, ended_of, settle
from gateway.generation.stream import GENERATION, GenerationGroup
from gateway.idempotency.claimed_key import CLAIMED_KEY
from gateway.metering.endings import Settled
from gateway.telemetry.keys import RECORD

Encoding = Literal["float", "base64"]

NUMBERS_PER_ENTRY = 8
"""The numbers that are written in the time of one logprob entry."""

Vectors = Sequence[bytes]
"""The result of each input, in order: float32, little endian."""


class VectorPlan(msgspec.Struct, frozen=True):
    """A checked request, with everything that the engine and the answer need of it."""

    orders: Sequence[EngineRequest]
    """Exactly one."""
    body: Callable[[Vectors], dict[str, Any]]
    """Returns the answer without usage. Its cost grows with `num_numbers`."""
    num_numbers: int
    ignored: Sequence[str]
    work: Work

    @property
    def num_inputs(self) -> int:
        pooling = self.orders[0].pooling
        assert pooling is not None
        return len(pooling.lengths)


async def answer(request: web.Request, plan: VectorPlan) -> web.Response:
    record = request[RECORD]
    record.asked = plan.orders[0].asked(plan.num_inputs)
    async with request.app[GENERATION].run(plan.orders, record, request.get(CLAIMED_KEY), ended_of(request)) as run:
        headers = dict(run.headers)
        if plan.ignored:
            headers["x-headgate-ignored"] = ", ".join(plan.ignored)
        await run.whole()  # results are kept by the generation
        (generation,) = run.generations
        vectors = [generation.vectors[index] for index in range(plan.num_inputs)]
        body = await plan.work(plan.num_numbers // NUMBERS_PER_ENTRY, partial(plan.body, vectors))
        whole = partial(_whole, plan, run, body)
        await settle(request, run, whole)
        return web.Response(body=whole(run.settled), content_type="application/json", headers=headers)


def _whole(plan: VectorPlan, run: GenerationGroup, body: dict[str, Any], settled: Sequence[Settled]) -> bytes:
    facts = plan.orders[0].facts
    usage = {
        "prompt_tokens": run.usage.prompt,
        "total_tokens": run.usage.total,
        "prompt_tokens_details": {"cached_tokens": run.usage.cache_read, "cache_write_tokens": run.usage.cache_write},
    }
    headgate = headgate_of(facts.request_id, facts.tier, settled, run.generations[0].final, None, (), run.num_resumes)
    headgate["cache"] = {"cached_tokens": run.usage.cache_read}
    return msgspec.json.encode(body | {"usage": usage, "headgate": headgate})


def numbers(vector: bytes) -> array[float]:
    """Returns the numbers of a result. Raises `ApiError` 500 for one that is no number: JSON has none for it."""
    found = array("f")
    found.frombytes(vector)
    if sys.byteorder == "big":
        found.byteswap()
    if not found or not math.isfinite(sum(found)):
        raise errors.internal()
    return found


def embeddings_body(model: str, encoding: Encoding, vectors: Vectors) -> dict[str, Any]:
    """Returns the body of `/v1/embeddings`. Each vector becomes JSON by itself, because a body may have megabytes."""
    pieces = [
        b'{"object":"embedding","index":%d,"embedding":%s}' % (index, _written(vector, encoding))
        for index, vector in enumerate(vectors)
    ]
    return {"object": "list", "data": msgspec.Raw(b"[" + b",".join(pieces) + b"]"), "model": model}


def _written(vector: bytes, encoding: Encoding) -> bytes:
    found = numbers(vector)
    if encoding == "base64":
        return b'"' + base64.b64encode(vector) + b'"'
    return msgspec.json.encode(found.tolist())
