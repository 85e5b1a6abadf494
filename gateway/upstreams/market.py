"""The market of bought capacity: all upstreams in force, and for each served model the link to those that answer for it.

The gateway's settings declare some, and SQL has those that were added while it serves. A place keeps its breaker for as
long as the declaration stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import aiohttp
from aiohttp import web

from gateway.routing.links.cache_view import CacheView
from gateway.routing.links.link import Mailbox
from gateway.upstreams.call import Order, UpstreamCall
from gateway.upstreams.place import Place
from gateway.upstreams.wires.values import Ask, Counter, Upstream
from workers.protocol.messages import PROTOCOL_VERSION, GenerateRequest, Hello
from workers.protocol.registry import Registration
from workers.protocol.reports import AdapterState, WorkerStatus

ROOT = "upstream:"
"""The roots of requests that were bought begin so."""


class UpstreamLink:
    """The bought capacity of one model, in the place of a worker's link."""

    def __init__(self, served: str, places: Sequence[Place], session: Callable[[], aiohttp.ClientSession]) -> None:
        self.served = served
        self.places = places
        self.registration = Registration(f"upstream:{served}", "", "", served, ROOT + served, 0)
        models = [place.upstream.model(served) for place in places]
        self.task = models[0].task
        self.hello: Hello | None = Hello(
            PROTOCOL_VERSION,
            "",
            model=served,
            root=ROOT + served,
            max_model_len=min(model.max_model_len for model in models),
            max_running=sum(place.upstream.source.max_running for place in places),
            tasks=(self.task,),
            vector_size=models[0].vector_size,
        )
        self.max_output_tokens = min(model.max_output_tokens for model in models)
        self.status = WorkerStatus()
        self.cached = CacheView(0)
        self.adapters: Mapping[str, AdapterState] = {}
        self.num_unreported_tokens = 0
        self._session = session
        self._calls: set[UpstreamCall] = set()

    @property
    def takes_work(self) -> bool:
        return any(place.takes_work(self.served) for place in self.places)

    @property
    def is_silent(self) -> bool:
        return False

    @property
    def wait_s(self) -> float:
        """The seconds for which nothing can be sent."""
        return min(place.wait_s(self.served) for place in self.places)

    @property
    def load(self) -> int:
        return len(self._calls)

    @property
    def first_token_s(self) -> float:
        """The time to the first token that is expected; 0: not known."""
        return min((place.first_token_s for place in self.places if place.takes_work(self.served)), default=0.0)

    def has_adapter(self, name: str) -> bool:
        return False

    @contextmanager
    def promised(self, num_uncached: int) -> Iterator[None]:
        yield

    def start_call(
        self,
        request: GenerateRequest,
        mailbox: Mailbox,
        number: int,
        num_uncached: int = 0,
        ask: tuple[Ask, Counter | None] | None = None,
    ) -> UpstreamCall:
        assert ask is not None, "a request for a worker of ours was sent to an upstream"
        order = Order(request.request_id, self.served, ask[0], request.lease_bound, ask[1], request.traceparent)
        call = UpstreamCall(order, self._next, self._session(), mailbox, number, self._calls.discard)
        self._calls.add(call)
        return call

    def _next(self, tried: Sequence[Place]) -> Place | None:
        """Chooses the next place: one that was not tried, else the one that was tried least."""
        able = [place for place in self.places if place.takes_work(self.served)]
        return min(able, key=lambda place: (tried.count(place), place.upstream.source.rank), default=None)


class Market:
    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.links: dict[str, UpstreamLink] = {}
        """The links by the name of the served model."""
        self.num_overflows = {"no_worker": 0, "slow": 0}
        """The requests for models of our own that were bought, by the reason."""
        self._session: aiohttp.ClientSession | None = None

    def open(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None
        return self._session

    def replace(self, upstreams: Sequence[Upstream]) -> None:
        """Serves exactly these from now on; running requests go on. The links stay the same if nothing changed."""
        before = {name: place.upstream for name, place in self.places.items()}
        if before == {upstream.name: upstream for upstream in upstreams}:
            return
        self.places = {
            upstream.name: self.places[upstream.name] if before.get(upstream.name) == upstream else Place(upstream)
            for upstream in upstreams
        }
        served: dict[str, list[Place]] = {}
        for place in sorted(self.places.values(), key=lambda one: (one.upstream.source.rank, one.upstream.name)):
            for name in place.upstream.source.models:
                served.setdefault(name, []).append(place)
        self.links = {
            name: UpstreamLink(name, _of_one_task(name, places), lambda: self.session)
            for name, places in served.items()
        }


def _of_one_task(served: str, places: Sequence[Place]) -> list[Place]:
    """Returns the places that serve the model for the same task (generate, embed, score) as the first one."""
    task = places[0].upstream.model(served).task
    return [place for place in places if place.upstream.model(served).task == task]


MARKET = web.AppKey("market", Market)
