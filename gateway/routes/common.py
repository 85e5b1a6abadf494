"""Helpers that the text routes share: the body, the model, the order of answering, and the separation of tenants' caches."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any, ParamSpec, Protocol, TypeVar

import msgspec
from aiohttp import web

from accounting.values.types import Principal, RequestFacts
from cache.tree.hashing import region_id
from gateway.base import errors
from gateway.base.app_keys import CACHE_SECRET, SETTINGS
from gateway.generation import quotes
from gateway.generation.prefixes import PREFIXES
from gateway.generation.reply import AnswerPlan, Work
from gateway.generation.served.models import MODELS, ServedModel
from gateway.generation.stream import GENERATION
from gateway.generation.vectors import VectorPlan
from gateway.http import body
from gateway.http.auth import PRINCIPAL
from gateway.http.body import NUM_BODY_BYTES
from gateway.idempotency import idempotency
from gateway.intake.body_checker import BODY_CHECKER
from gateway.intake.fingerprints import FINGERPRINT, Fingerprint, fingerprint_in_pieces
from gateway.intake.json_body import INLINE_BYTES, decode_object, decode_stored
from gateway.intake.json_pieces import Cut
from gateway.intake.text_work import TEXT_WORK
from gateway.intake.throttle import THROTTLE
from gateway.parsers import forced
from gateway.parsers.forced import Wanted
from gateway.schema.convert import convert
from gateway.schema.sampling import MAX_CHOICES, SamplingFields, check_bans, check_constrained, outputs_of
from gateway.structured import form as structured
from gateway.structured.form import Form
from gateway.telemetry.keys import RECORD
from workers.protocol.messages import Hello, Region, Task, Tier

NEAR_BYTES = 2048
"""The largest body whose text is rendered and encoded on the loop; it takes less than a millisecond."""
INLINE_ENTRIES = 1024
"""The largest number of logprobs that is written on the loop; it takes about 2 ms."""
ENTRY_BYTES = 32
"""The number of body bytes that take as long as one logprob entry."""

MOST_OF_ANY = 8
"""The number of choices that a request may have, however few sequences a worker runs."""
_DOES: dict[Task, str] = {
    "generate": "generates text",
    "embed": "gives embeddings and no text",
    "score": "gives scores and no text",
}
_ROUTES_OF: dict[Task, str] = {
    "generate": "/v1/chat/completions",
    "embed": "/v1/embeddings",
    "score": "/v1/rerank or /v1/score",
}

P = ParamSpec("P")
T = TypeVar("T")
Q = TypeVar("Q", AnswerPlan, VectorPlan)
S = TypeVar("S", bound=msgspec.Struct)
Decode = Callable[[bytes, list[Cut] | None], T]
"""Decodes a body, whose cuts are known if it was checked before."""

_LINE_KEY = re.compile(r"batch:(?P<batch>batch_[0-9a-f]+):(?P<line>\d{1,9})")


async def in_thread(request: web.Request, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a function off the loop, when it is the tenant's turn. Its cost is the number of bytes of the body."""
    return await request.app[TEXT_WORK].run(
        request[PRINCIPAL].tenant_id, request[NUM_BODY_BYTES], lambda: function(*args, **kwargs)
    )


async def aside(request: web.Request, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a function whose time grows with the body: off the loop, unless the body is small."""
    if request[NUM_BODY_BYTES] <= INLINE_BYTES:
        return function(*args, **kwargs)
    return await in_thread(request, function, *args, **kwargs)


async def near(request: web.Request, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs a template or the tokenizer: off the loop, unless the body is so small that the way to a thread and back
    would take longer.
    """
    if request[NUM_BODY_BYTES] <= NEAR_BYTES:
        return function(*args, **kwargs)
    return await in_thread(request, function, *args, **kwargs)


def work_of(request: web.Request) -> Work:
    """Returns the runner of the answer's own work: off the loop in the tenant's turn, if there are many logprobs."""

    async def work(num_entries: int, function: Callable[[], T]) -> T:
        if num_entries <= INLINE_ENTRIES:
            return function()
        tenant_id = request[PRINCIPAL].tenant_id
        return await request.app[TEXT_WORK].run(tenant_id, num_entries * ENTRY_BYTES, function)

    return work


async def decode_aside(request: web.Request, data: bytes, decode: Decode[T]) -> T:
    """Decodes a body: off the loop, and after a check in a process of its own, unless it is small. Raises `ApiError`."""
    checker = request.app[BODY_CHECKER]

    def run() -> T:
        return decode(data, checker.check(data) if len(data) > INLINE_BYTES else None)

    return await aside(request, run)


async def json_object(request: web.Request) -> dict[str, Any]:
    """Reads the request's body as one JSON object. Raises `ApiError`."""
    return await _decoded(request, decode_object)


async def stored_object(request: web.Request) -> dict[str, Any]:
    """Reads a body whose texts SQL keeps or compares. Raises `ApiError`."""
    return await _decoded(request, decode_stored)


async def _decoded(request: web.Request, decode: Decode[dict[str, Any]]) -> dict[str, Any]:
    data = await body.read(request, request.app[SETTINGS].json_body_bytes)
    request[NUM_BODY_BYTES] = len(data)
    return await decode_aside(request, data, decode)


async def fields_of(request: web.Request, kind: type[S]) -> S:
    """Reads the request's body as one struct. Raises `ApiError`."""
    return await aside(request, convert, await json_object(request), kind)


async def known_object(request: web.Request) -> dict[str, Any]:
    """Reads the body of a request whose repeat may have to be recognised, and sets its fingerprint.
    Raises `ApiError`.
    """
    value = await json_object(request)
    request[FINGERPRINT] = await fingerprint_of(request, request.path, value)
    return value


async def fingerprint_of(request: web.Request, path: str, value: dict[str, Any]) -> Fingerprint:
    """Returns the fingerprint of `value`, the request's body or a part of it, as a body sent to `path`."""
    if request[NUM_BODY_BYTES] <= INLINE_BYTES:
        return Fingerprint(path, value)
    return Fingerprint(path, value, await in_thread(request, fingerprint_in_pieces, path, value))


async def answer_once(
    request: web.Request,
    plan: Callable[[web.Request, dict[str, Any], tuple[str, int] | None], Awaitable[Q]],
    answer: Callable[[web.Request, Q], Awaitable[web.StreamResponse]],
) -> web.StreamResponse:
    """Plans and answers a request: a repeat is answered from the store, a tenant whose requests workers refuse is refused
    here, and a quote that the request names gives its terms. Raises `ApiError`.
    """
    value = await known_object(request)
    line = batch_line(request)
    model = value.get("model")
    if line is None and isinstance(model, str) and idempotency.own_key(request) is not None:
        # Another key of the tenant may have had the answer, or this one before.
        request.app[MODELS].refuse(model, request[PRINCIPAL])

    async def run() -> web.StreamResponse:
        async with unless_overloaded(request, value):
            planned = await plan(request, value, line)
            if quotes.HEADER not in request.headers:
                return await answer(request, planned)
            async with quotes.bound(request, planned) as bound:
                return await answer(request, bound)

    return await idempotency.once(request, value, line, run)


@asynccontextmanager
async def unless_overloaded(request: web.Request, value: Mapping[str, Any]) -> AsyncIterator[None]:
    """Wraps all work for a request. Raises `ApiError` 503 for a request that workers would refuse, and learns from
    their refusals. A batch request waits instead, and is never refused.
    """
    throttle, tenant, model = (request.app[THROTTLE], request[PRINCIPAL].tenant_id, value.get("model"))
    if not isinstance(model, str) or tier_of(request) == "batch":
        yield
        return
    if not throttle.is_open(tenant, model, time.monotonic()):
        request[RECORD].model = model  # a worker has refused the model, so a model with this name exists
        known_by = request[FINGERPRINT].digest()
        after_s = throttle.refuse(tenant, model, known_by, time.monotonic())
        if after_s > 0:
            raise errors.overloaded(int(after_s * 1000))
    try:
        yield
    except errors.ApiError as error:
        if error.code == "overloaded" and request[RECORD].worker:
            known_by = request[FINGERPRINT].digest()
            after_s = int(error.headers["retry-after-ms"]) / 1000
            throttle.refused(tenant, model, known_by, after_s, time.monotonic())
        raise


async def output_form_of(request: web.Request, fields: SamplingFields, wanted: Wanted) -> Form | None:
    """Returns the form of a whole output, calls and reasoning included. Raises `ApiError` 400."""
    if wanted.is_free:
        return None
    form = await in_thread(request, forced.form_of, wanted)
    if form is not None and wanted.answer is None:
        request[RECORD].mark("grammar")
        check_constrained(fields)
    return form


async def form_of(request: web.Request, fields: SamplingFields) -> Form | None:
    """Returns the form that the answer must have; None means any text. Raises `ApiError` 400."""
    outputs, name = outputs_of(fields)
    if fields.response_format is None and outputs is None:
        return None
    form = await in_thread(request, structured.form_of, fields.response_format, outputs, name)
    if form is not None:
        request[RECORD].mark("grammar")
        check_constrained(fields)
    return form


async def bad_words_of(request: web.Request, fields: SamplingFields, model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Returns the banned words as tokens; at least one other token can be drawn. Raises `ApiError` 400."""
    words: tuple[tuple[int, ...], ...] = ()
    if fields.bad_words is not None:
        words = await in_thread(request, model.encode_bad_words, fields.bad_words)
    if words or fields.allowed_token_ids is not None:
        check_bans(fields, words, model.tokenizer.vocab_size, model.end_ids)
    return words


def served_model(request: web.Request, name: str, task: Task | None = None) -> ServedModel:
    """Returns the model of the request, which can do the task, or the fallback that can answer in its place. Raises
    `ApiError` 404, 403, or 400.
    """
    models, principal = request.app[MODELS], request[PRINCIPAL]
    model = models.get(name, principal)
    if not can_answer(request, model):
        others = models.fallbacks(model, principal)
        model = next((other for other in others if can_answer(request, other)), model)
    request[RECORD].model = model.id
    known = tasks_of(request, model)
    if task is not None and known and task not in known:
        raise errors.invalid(f"This model {_DOES[known[0]]}: use {_ROUTES_OF[known[0]]}.", "model")
    return model


async def count(request: web.Request, model: ServedModel) -> dict[str, str]:
    """Counts a request that runs nothing by the limits of requests, and returns their headers. Raises `ApiError` 429."""
    admission = request.app[GENERATION].admission
    return await admission.count(request[RECORD].request_id, request[PRINCIPAL], model.id)


def check_choices(request: web.Request, model: ServedModel, fields: SamplingFields) -> None:
    """Refuses more choices than half of what a worker of the model runs at once: they start together, and others wait
    until so many places are free. Raises `ApiError` 400.
    """
    if fields.num_drawn == 1:
        return
    places = min((hello.max_running for hello in hellos(request, model) if hello.max_running), default=MAX_CHOICES)
    most = max(MOST_OF_ANY, places // 2)
    if fields.num_drawn > most:
        name = "n" if fields.best_of is None else "best_of"
        raise errors.invalid(
            f"A request to this model has at most {most} choices: half of what a worker runs at once.", name
        )


def hellos(request: web.Request, model: ServedModel) -> list[Hello]:
    """Returns what the model's linked workers have said of themselves."""
    return request.app[GENERATION].capacity.hellos(model.on_workers)


def tasks_of(request: web.Request, model: ServedModel) -> tuple[Task, ...]:
    """Returns what the model can do; nothing if no worker has said it yet."""
    found = hellos(request, model)
    return found[0].tasks if found else ()


def can_answer(request: web.Request, model: ServedModel) -> bool:
    """Says whether a linked worker takes work for the model."""
    buys = model.is_foreign or request[PRINCIPAL].buys_overflow
    return request.app[GENERATION].capacity.takes_work(model.on_workers, model.tokenizer.vocabulary, buys)


def max_len(request: web.Request, model: ServedModel) -> int:
    """Returns the most tokens that the model and its linked workers can hold."""
    lengths = [hello.max_model_len for hello in hellos(request, model) if hello.max_model_len]
    return min([model.max_model_len, *lengths])


def namespace(secret: bytes, principal: Principal, user: str, salt: str | None) -> tuple[Region, ...]:
    """Returns the region in which the request's KV lies: the tenant's, or the part of it that belongs to the key or to
    the key's end user, as the tenant's setting says. A salt divides the region and cannot leave it.
    """
    isolation = principal.cache.isolation
    key_id = "" if isolation == "tenant" else principal.key_id
    return _namespace(secret, principal.tenant_id, key_id, user if isolation == "end_user" else "", salt)


@lru_cache(maxsize=4096)
def _namespace(secret: bytes, tenant_id: str, key_id: str, user: str, salt: str | None) -> tuple[Region, ...]:
    parts = [b"tenant", tenant_id.encode()]
    if key_id:
        parts += [b"key", key_id.encode()]
    if user:
        parts += [b"user", user.encode()]
    if salt is not None:
        parts += [b"salt", salt.encode()]
    return (Region(region_id(secret, *parts)),)


def namespace_of(
    request: web.Request, model: ServedModel, prompt: Sequence[int], user: str, salt: str | None
) -> tuple[Region, ...]:
    """Returns the cache regions of a prompt: the public one as far as the prompt is a registered prefix, then the
    request's own. KV of an adapter is never public.
    """
    own = namespace(request.app[CACHE_SECRET], request[PRINCIPAL], user, salt)
    if model.adapter:
        return own
    return request.app[PREFIXES].path(model.id, prompt, own)


class Named(Protocol):
    """The fields of a body that say what a request belongs to."""

    @property
    def metadata(self) -> dict[str, str] | None: ...
    @property
    def prompt_cache_key(self) -> str | None: ...


def tier_of(request: web.Request) -> Tier:
    tier: Tier = "batch" if request[PRINCIPAL].kind == "batch" else "interactive"
    request[RECORD].tier = tier
    return tier


def describe(
    request: web.Request,
    value: Mapping[str, Any],
    fields: Named,
    model: ServedModel,
    num_prompt_tokens: int,
    line: tuple[str, int] | None,
) -> RequestFacts:
    """Returns what the journal, the ledger and the logs know of the request. Called when its prompts are counted."""
    record, principal = request[RECORD], request[PRINCIPAL]
    user = value.get("safety_identifier") or value.get("user")
    record.facts = RequestFacts(
        request_id=record.request_id,
        tenant_id=principal.tenant_id,
        key_id=principal.key_id,
        model=model.id,
        tier=tier_of(request),
        endpoint=record.route,
        prompt_tokens=num_prompt_tokens,
        trace_id=record.outgoing_traceparent[3:35],
        batch_id=line and line[0],
        line_no=line and line[1],
        user=user if isinstance(user, str) else "",
        metadata=fields.metadata,
        session_id=_session(value, fields),
    )
    record.mark("tokenized")
    return record.facts


def _session(value: Mapping[str, Any], fields: Named) -> str:
    """Returns the conversation that the client names: by a key for the cache, in the metadata, or by its own user."""
    named = fields.prompt_cache_key or (fields.metadata or {}).get("session_id") or value.get("user")
    return named if isinstance(named, str) else ""


def batch_line(request: web.Request) -> tuple[str, int] | None:
    """Returns the (batch, line) of a batch runner's request, from its Idempotency-Key; a runner always sends one.
    Raises `ApiError` 400.
    """
    principal = request[PRINCIPAL]
    if principal.kind != "batch":
        return None
    match = _LINE_KEY.fullmatch(request.headers.get("idempotency-key", ""))
    if match is None or match["batch"] != principal.batch_id:
        raise errors.invalid("This Idempotency-Key is not one of the batch.")
    return match["batch"], int(match["line"])
