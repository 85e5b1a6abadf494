"""The highest cost of a request, quoted before it runs, and the request that redeems the quote.

A quote binds the price version and the output bound. With both the charge cannot exceed the quoted maximum, since it is
the same product of tokens and rates, rounded up. It knows rates only as values handed on.
"""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from accounting.prices import pricing
from accounting.requests import quotes
from accounting.requests.quotes import LASTS_MS, Terms
from accounting.values import clock
from accounting.values.types import Price, Rates, Usage
from gateway.base import errors, ids
from gateway.generation.engine_request import EngineRequest
from gateway.generation.reply import AnswerPlan
from gateway.generation.stream import GENERATION
from gateway.generation.vectors import VectorPlan
from gateway.http import sql
from gateway.http.auth import PRINCIPAL
from gateway.intake.fingerprints import FINGERPRINT
from gateway.routing.links.trust import LinkDown
from gateway.routing.links.worker_link import WorkerLink
from gateway.telemetry.keys import RECORD
from workers.protocol.frames import FrameError
from workers.protocol.messages import CacheProbed

HEADER = "x-headgate-quote"
ASKED_AT_ONCE = 64
"""The most parts that a worker is asked about at one time."""
P = TypeVar("P", AnswerPlan, VectorPlan)


@dataclass(frozen=True)
class Part:
    """One text that a worker reads: a prompt, or one of the inputs of a request for vectors."""

    order: EngineRequest
    tokens: array[int]


@dataclass(frozen=True)
class Cached:
    """The answer of one worker for every part."""

    num_tokens: Sequence[int]
    block_size: int
    wait_ms: int


async def make(request: web.Request, known_by: bytes, plan: AnswerPlan | VectorPlan) -> dict[str, Any]:
    """Stores a quote and returns its object. `known_by` is the fingerprint of the request that the quote is for. Raises
    `ApiError`.
    """
    principal, orders = request[PRINCIPAL], plan.orders
    model, tier = orders[0].model.id, orders[0].facts.tier
    admission = request.app[GENERATION].admission
    price = await admission.price(principal.tenant_id, model, tier, base=orders[0].model.base)
    parts = [part for order in orders for part in parts_of(order)]
    cached = await ask_worker(request, parts)
    terms = Terms(
        model, price.version, price.currency, max(order.max_tokens for order in orders), _most(orders, price.rates)
    )
    quote_id, expires_at_ms = ids.object_id("quote_"), clock.now_ms() + LASTS_MS
    async with sql.writing(request, changes_identities=False) as conn:
        await quotes.create(conn, quote_id, principal.tenant_id, known_by, terms, expires_at_ms)
    return {
        "id": quote_id,
        "object": "quote",
        "model": model,
        "num_prompt_tokens": sum(len(order.prompt) for order in orders),
        "num_cached_tokens": sum(cached.num_tokens),
        "max_output_tokens": sum(order.max_tokens * order.num_choices for order in orders),
        "max_charge_micro_units": terms.max_charge,
        "likely_charge_micro_units": _likely(orders, parts, cached, price),
        "currency": price.currency,
        "price_version": price.version,
        "expected_queue_ms": cached.wait_ms,
        "expires_at": expires_at_ms // 1000,
    }


@asynccontextmanager
async def bound(request: web.Request, plan: P) -> AsyncIterator[P]:
    """Yields the plan at the terms of the quote that the request names, if it names one. A refusal makes the quote
    usable again.
    """
    quote_id = request.headers.get(HEADER)
    if quote_id is None:
        yield plan
        return
    if not quote_id.isascii():  # no quote has such an id, and bytes that are no UTF-8 cannot be asked for
        raise _invalid()
    principal, request_id = request[PRINCIPAL], request[RECORD].request_id
    async with sql.writing(request, changes_identities=False) as conn:
        terms = await quotes.use(
            conn, quote_id, principal.tenant_id, request[FINGERPRINT].digest(), request_id, clock.now_ms()
        )
        price = None if terms is None else await quotes.price(conn, terms, plan.orders[0].facts.tier)
    if terms is None or price is None:
        raise _invalid()
    try:
        yield _at_terms(plan, terms, price)
    except errors.ApiError:
        async with sql.writing(request, changes_identities=False) as conn:
            await quotes.give_back(conn, quote_id, request_id)
        raise


def _at_terms(plan: P, terms: Terms, price: Price) -> P:
    if plan.orders[0].model.id != terms.model:  # a fallback would answer, or no longer does
        raise _invalid()
    orders = [
        msgspec.structs.replace(order, price=price, max_tokens=min(order.max_tokens, terms.max_output_tokens))
        for order in plan.orders
    ]
    if _most(orders, price.rates) > terms.max_charge:  # the same text has become more tokens
        raise _invalid()
    return msgspec.structs.replace(plan, orders=orders)


def parts_of(order: EngineRequest) -> list[Part]:
    """Returns the texts of a request."""
    if order.pooling is None:
        return [Part(order, order.prompt)]
    ends = itertools.accumulate(order.pooling.lengths)
    return [
        Part(order, order.prompt[end - length : end]) for length, end in zip(order.pooling.lengths, ends, strict=True)
    ]


async def ask_worker(request: web.Request, parts: Sequence[Part]) -> Cached:
    """Asks the worker that the router would choose now. If it does not answer, there is no quote: a guess would be
    believed.
    """
    engine, order = request.app[GENERATION], parts[0].order
    if order.is_bought:
        raise errors.invalid(
            "There are no quotes for this model: its provider counts the tokens.", "model", "unsupported_parameter"
        )
    routed = order.to_route()
    links = engine.fleet.links
    await asyncio.to_thread(engine.router.prepare, links, routed)
    link = engine.router.choose(links, routed).link
    assert isinstance(link, WorkerLink)
    found: list[CacheProbed] = []
    try:
        for start in range(0, len(parts), ASKED_AT_ONCE):
            some = parts[start : start + ASKED_AT_ONCE]
            found += await asyncio.gather(*(_probed(link, part) for part in some))
    except LinkDown:
        found = []
    except FrameError:
        raise errors.too_large("The prompt is too large.") from None
    if not found or any(one.num_cached_tokens < 0 for one in found):
        raise errors.unavailable("quote_unavailable", "No worker can answer for this model now.")
    assert link.hello is not None
    return Cached([one.num_cached_tokens for one in found], link.hello.block_size, max(one.wait_ms for one in found))


def _probed(link: WorkerLink, part: Part) -> Awaitable[CacheProbed]:
    one = part.order.to_route()
    return link.probe(one.path, part.tokens, adapter=one.adapter, cache_read=one.read)


def _most(orders: Sequence[EngineRequest], rates: Rates) -> int:
    """Returns the cost if nothing is cached, at the highest input rate, and if every choice reaches its bound."""
    return sum(
        pricing.prompt_reservation(len(order.prompt), rates)
        + pricing.lease_cost(order.max_tokens * order.num_choices, rates)
        for order in orders
    )


def _likely(orders: Sequence[EngineRequest], parts: Sequence[Part], cached: Cached, price: Price) -> int:
    """Returns the cost if the prompt is cached as it would be now, and if every choice reaches its bound."""
    rates, total = price.rates, 0
    found = list(zip(parts, cached.num_tokens, strict=True))
    for order in orders:
        inputs = [_input(part, num, cached.block_size, rates) for part, num in found if part.order is order]
        output = order.max_tokens * order.num_choices
        usage = Usage(
            sum(one.cache_read for one in inputs),
            sum(one.cache_write for one in inputs),
            sum(one.uncached for one in inputs),
            output,
        )
        total += pricing.charge(usage, rates).total
    return total


def _input(part: Part, num_cached: int, block_size: int, rates: Rates) -> Usage:
    order, num_tokens = part.order, len(part.tokens)
    whole = num_tokens // max(1, block_size) * block_size
    written = max(0, whole - num_cached) if order.principal.cache.write else 0
    if order.pooling is not None and rates.cache_write < rates.uncached:
        written = 0  # the worker has not said whether its model keeps what it reads
    return Usage(num_cached, written, num_tokens - num_cached - written, 0)


def _invalid() -> errors.ApiError:
    return errors.invalid("The quote is unknown, used, past its time, or of another request.", None, "quote_invalid")
