"""The choice of the capacity that answers a request: workers of our own first, and bought capacity where these cannot keep the promise.

`decide` is the rule, and pure. A request overflows only if its tenant allows it, if an upstream can say all of it, and
never under a quote, which names the price of our own. It then has its own model in prices and books, NAME:overflow.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal
from weakref import WeakValueDictionary

import msgspec

from accounting.values.types import RequestFacts
from gateway.base import errors
from gateway.generation.engine_request import EngineRequest
from gateway.routing.links import failures
from gateway.routing.links.fleet import Fleet
from gateway.routing.links.link import Link, reads
from gateway.routing.links.quarantine import fingerprint
from gateway.routing.router import Pick, Prompt, Router
from gateway.upstreams.market import Market, UpstreamLink
from workers.protocol.messages import Hello

logger = logging.getLogger(__name__)

SUFFIX = ":overflow"
INLINE_TOKENS = 16_384
"""A prompt of this many tokens is hashed in about 0.3 ms."""
RESUME_LOOK_S, RESUME_GAP_S = 0.1, 0.001
"""The least time between two looks for a worker that can go on with a request, and that between two such requests."""
RESUME_TURN_S = 300.0
"""How long such a request waits at most, for its turn if it is a suspect. A worker may have had hundreds in their first steps."""
APART_S, APART_LOOK_S = 10.0, 0.05
"""How long a suspect waits for a worker without another one, and the time between two looks."""
Why = Literal["own", "no_worker", "slow"]


def overflow_name(model: str) -> str:
    """Returns the name under which bought capacity of a model of our own is priced and billed."""
    return model + SUFFIX


def decide(own_ttft_s: float | None, bought_ttft_s: float | None, promise_s: float) -> Why:
    """Decides who answers. `own_ttft_s` is the predicted time to the first token of the best worker; None if there is
    none. `bought_ttft_s` is the upstream's, 0 if it is not known; None if nothing can be bought.
    """
    if bought_ttft_s is None:
        return "own"
    if own_ttft_s is None:
        return "no_worker"
    return "slow" if own_ttft_s > promise_s and bought_ttft_s < own_ttft_s else "own"


@dataclass
class Capacity:
    """All that may answer: workers of our own and upstreams."""

    fleet: Fleet
    market: Market
    router: Router
    promise_s: float
    """The promised time to the first token."""
    resume_s: float = 60.0
    """How long a request whose worker was lost waits for another one. With 0 it fails at once."""
    num_looking: int = 0
    """The requests that are about to look for a worker that can go on with them."""
    turns: WeakValueDictionary[tuple[str, str], asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """The turns of suspects that look for a worker, by tenant and model."""

    def links(self, order: EngineRequest) -> Collection[Link]:
        if not order.is_bought:
            return self.fleet.links
        link = self.market.links.get(order.model.on_workers)
        return [link] if link is not None else []

    def hellos(self, model: str) -> list[Hello]:
        """Returns what the model's linked workers have said of themselves, or what is known of what can be bought."""
        bought = self.market.links.get(model)
        own = self.fleet.hellos(model)
        return own if own or bought is None or bought.hello is None else [bought.hello]

    def takes_work(self, model: str, vocabulary: str, buys: bool) -> bool:
        """Says whether a worker takes work for the model, in ids of this vocabulary; `buys` if bought capacity counts in
        addition to our own.
        """
        for link in self.fleet.links:
            if link.registration.model == model and link.takes_work and reads(link, vocabulary):
                return True
        bought = self.market.links.get(model)
        return bought is not None and bought.takes_work and buys

    def placed(self, orders: Sequence[EngineRequest], prompts: Sequence[Prompt]) -> Sequence[EngineRequest]:
        """Returns the orders as they are answered: as they came, or bought. Raises `ApiError` 503 with a time if what
        must be bought cannot be bought now.
        """
        order = orders[0]
        link = self.market.links.get(order.model.on_workers)
        if order.is_bought:
            if link is not None and not link.takes_work:
                raise errors.unavailable(
                    "upstream_unavailable",
                    "This model's provider cannot answer now.",
                    int(1000 * max(1.0, link.wait_s)),
                )
            return orders
        if link is None or not self._may_buy(orders, link):
            return orders
        why = decide(self._own_ttft_s(prompts[0]), link.first_token_s, self.promise_s)
        if why == "own":
            return orders
        if unasked := next((one.unasked for one in orders if one.foreign is None), ""):
            words = {"request_id": order.facts.request_id, "why": why, "field": unasked}
            logger.info("overflow_not_bought", extra=words)
            return orders
        self.market.num_overflows[why] += 1
        return [_bought(one) for one in orders]

    async def choose(self, order: EngineRequest, prompt: Prompt, root: str = "", apart_s: float = APART_S) -> Pick:
        """Chooses a worker; with `root` only one with these weights. A long prompt is hashed in a thread first. A suspect
        waits for its turn for at most `apart_s`. Raises `ApiError` 503 when no worker takes work.
        """
        router, links = self.router, self.links(order)
        if len(prompt.tokens) > INLINE_TOKENS:
            await asyncio.to_thread(router.prepare, links, prompt)
        if self.fleet.quarantine.is_empty or order.is_bought:
            return router.choose(_heard(links, root), prompt)
        return await self._choose_apart(order.facts, prompt, root, apart_s)

    async def resume(
        self, order: EngineRequest, prompt: Prompt, root: str, send: Callable[[Pick], None], pause_s: float = 0.0
    ) -> Pick:
        """Sends a request to the next worker with these weights, which may have to start first. `send` raises `ApiError`
        if the chosen one cannot be sent it. The first look is after `pause_s`. Raises `TimeoutError` once no such worker
        took work for `resume_s`, or a suspect has waited for its turn for `RESUME_TURN_S`, and `ApiError` 500 for a
        request that is quarantined.
        """
        began = seen = time.monotonic()
        while True:
            await self._pause(pause_s)
            pause_s = RESUME_LOOK_S
            try:
                self.router.check(_heard(self.fleet.links, root), prompt)
            except errors.ApiError:
                if time.monotonic() - seen > self.resume_s:
                    raise TimeoutError from None
                continue
            try:
                pick = await self.choose(order, prompt, root, RESUME_TURN_S)
                self.router.sent(pick)
                with pick.link.promised(pick.num_uncached), pick.apart:
                    send(pick)
                return pick
            except errors.ApiError as refusal:
                if refusal.status != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise
            seen = time.monotonic()
            if seen - began > RESUME_TURN_S:
                raise TimeoutError

    async def _pause(self, least_s: float) -> None:
        """Waits before a look. A worker may have had thousands of requests: they follow each other, so that the loop has
        time for others between them.
        """
        self.num_looking += 1
        try:
            await asyncio.sleep(least_s + self.num_looking * RESUME_GAP_S)
        finally:
            self.num_looking -= 1

    async def _choose_apart(self, facts: RequestFacts, prompt: Prompt, root: str, apart_s: float) -> Pick:
        """Chooses a worker on which no other suspect is in its first steps, if the request is one. Waits for one for
        some seconds. Raises `ApiError` 500 for a request that is quarantined.
        """
        quarantine = self.fleet.quarantine
        request = fingerprint(facts.tenant_id, prompt.model, prompt.adapter, prompt.tokens)
        if not quarantine.is_suspect(request):
            return self.router.choose(_heard(self.fleet.links, root), prompt)
        # One of a tenant looks for a worker at a time: thousands may be suspects at once, and their looks take the loop's time.
        turn = self.turns.setdefault((facts.tenant_id, prompt.model), asyncio.Lock())
        try:
            async with asyncio.timeout(apart_s), turn:
                return await self._choose_for_suspect(facts, prompt, request, root)
        except TimeoutError:
            raise errors.overloaded(1000) from None

    async def _choose_for_suspect(self, facts: RequestFacts, prompt: Prompt, request: bytes, root: str) -> Pick:
        quarantine = self.fleet.quarantine
        while True:
            if quarantine.is_guilty(request):
                words = {"request_id": facts.request_id, "tenant": facts.tenant_id}
                logger.warning("request_quarantined", extra=words)
                raise failures.quarantined()
            avoid = self.fleet.with_suspects() if quarantine.is_suspect(request) else set()
            try:
                pick = self.router.choose(_heard(self.fleet.links, root), prompt, avoid)
            except errors.ApiError:
                self.router.check(_heard(self.fleet.links, root), prompt)  # raises if there is no worker at all
                await asyncio.sleep(APART_LOOK_S)
                continue
            if not quarantine.is_suspect(request):
                return pick
            return msgspec.structs.replace(pick, apart=quarantine.reserved(pick.link.registration.worker))

    def _may_buy(self, orders: Sequence[EngineRequest], link: UpstreamLink) -> bool:
        may = orders[0].principal.buys_overflow and orders[0].facts.tier == "interactive"
        unbound = all(order.price is None and (order.foreign is not None or order.unasked) for order in orders)
        return link.takes_work and may and unbound

    def _own_ttft_s(self, prompt: Prompt) -> float | None:
        try:
            return self.router.choose(self.fleet.links, prompt).placement.ttft_s
        except errors.ApiError:
            return None


def _heard(links: Collection[Link], root: str) -> Collection[Link]:
    """Returns the links to workers that may go on with a lost worker's request: they have these weights, and are heard.
    What made one worker silent may make all of them silent, and the request would be blamed for the next one. Without a
    `root` it returns all links.
    """
    if not root:
        return links
    return [one for one in links if one.hello and one.hello.root == root and one.hello.takes_over and not one.is_silent]


def _bought(order: EngineRequest) -> EngineRequest:
    assert order.foreign is not None
    facts = msgspec.structs.replace(
        order.facts, model=overflow_name(order.facts.model), prompt_tokens=order.foreign.prompt.high
    )
    return msgspec.structs.replace(order, facts=facts, is_bought=True)
