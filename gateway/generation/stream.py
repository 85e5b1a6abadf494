"""All engine requests of one HTTP request, from admission to settlement, whether the client stays or leaves.

`GenerationGroup` is a context manager. Requests that were admitted inside it are settled or voided when it ends, in a
task of its own if the client has gone. It knows no JSON and no SSE.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import msgspec
from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from accounting.values.types import Outcome, Posting, Usage
from gateway.base import errors
from gateway.base.lifecycle import Detached, Lifecycle
from gateway.base.running import Running
from gateway.books.spending import OrganizationLimit
from gateway.generation.capacity import Capacity
from gateway.generation.engine_request import EngineRequest
from gateway.generation.generation import FINAL_S, ChoicePiece, Generation
from gateway.generation.resumes import Resumes
from gateway.idempotency.claimed_key import ClaimedKey, not_stored
from gateway.limiter.rules import BudgetUse
from gateway.metering.admission import Admission, Reserved
from gateway.metering.endings import Settled
from gateway.metering.settlement import unstored
from gateway.routing.links.fleet import Fleet
from gateway.routing.links.link import Event, Mailbox
from gateway.routing.router import Prompt, Router
from gateway.telemetry.record import Cut, RequestRecord
from workers.protocol.messages import Finished
from workers.protocol.patience import TICKS

logger = logging.getLogger(__name__)

PING_S = 15.0

Ended = Callable[[Sequence[str], bool], Coroutine[Any, Any, None]]
"""Called after the settlement with the engine requests that were charged, and whether their client had left before it.
"""

_OUTCOMES: dict[str, Outcome] = {
    "upstream_lost": "worker_lost",
    "request_quarantined": "worker_lost",
    "lease_lost": "lease_lost",
    "server_draining": "drain",
    "invalid_api_key": "client_gone",
    "tenant_suspended": "client_gone",
    "project_archived": "client_gone",
    "upstream_unavailable": "worker_lost",
}
_CUTS: dict[Outcome, Cut] = {
    "client_gone": "client_gone",
    "worker_lost": "worker_lost",
    "lease_lost": "lease_lost",
    "drain": "drained",
}


@dataclass(frozen=True)
class GenerationServices:
    """The services of the process that a run needs."""

    admission: Admission
    fleet: Fleet
    router: Router
    detached: Detached
    lifecycle: Lifecycle
    running: Running
    spending: OrganizationLimit
    capacity: Capacity

    def run(
        self,
        orders: Sequence[EngineRequest],
        record: RequestRecord,
        key: ClaimedKey | None = None,
        ended: Ended | None = None,
    ) -> GenerationGroup:
        return GenerationGroup(self, orders, record, key, ended)


class Numbered(msgspec.Struct, frozen=True):
    """A piece of a choice, numbered over all prompts: i * n + j."""

    index: int
    piece: ChoicePiece


class GenerationGroup:
    """The engine requests of one HTTP request. Entering it (`async with engine.run(orders, record) as run`) admits and
    dispatches them; leaving it ends each. Call `more` or `push` until every sequence has ended, or `whole`; then
    `settle`."""

    def __init__(
        self,
        engine: GenerationServices,
        orders: Sequence[EngineRequest],
        record: RequestRecord,
        key: ClaimedKey | None = None,
        ended: Ended | None = None,
    ) -> None:
        """Takes a `key` if the request has one: it is then charged if and only if its answer is stored under the key."""
        self._engine = engine
        self._orders = orders
        self._prompts = [order.to_route() for order in orders]
        self._record = record
        self._key = key
        self._ended = ended
        self._mailbox = Mailbox()
        self._has_started = False
        self._has_ended = False
        self._failed: Generation | None = None
        """The one whose event ended all of them."""
        self._resumes = Resumes(engine.capacity, record, self._mailbox)
        self._reserved: deque[Reserved] = deque()
        self.generations: list[Generation] = []
        self.settled: list[Settled] = []

    async def __aenter__(self) -> GenerationGroup:
        self._engine.lifecycle.on_cut.add(self._cut)
        self._engine.running.add(self._orders[0].principal, self._revoke)
        try:
            self._engine.spending.check()
            self._place_orders()
            for order in self._orders:
                self._reserved.append(await self._engine.admission.reserve(order.ask()))
            self._record.mark("admitted")
            for number, (order, prompt) in enumerate(zip(self._orders, self._prompts, strict=True)):
                if number:
                    await asyncio.sleep(0)  # 128 prompts are much work: other tasks get their turn between them
                await self._start(order, prompt)
            self._record.mark("dispatched")
        except BaseException as error:
            self._end(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)

    @property
    def root(self) -> str:
        """The root of the worker that answers, or of the first of several."""
        return self.generations[0].admitted.root

    @property
    def headers(self) -> dict[str, str]:
        """The limiter's answer to this very request, as headers."""
        return self.generations[-1].admitted.headers if self.generations else {}

    @property
    def is_going(self) -> bool:
        """Whether a sequence has not ended yet."""
        return not all(generation.has_final for generation in self.generations)

    async def more(self) -> list[Numbered] | None:
        """Returns the pieces that come next, in the order of arrival; none if nothing came for 15 s, and None once every
        sequence has ended.
        """
        while self.is_going:
            items = await self._mailbox.take(PING_S)
            if not items:
                return []
            found: list[Numbered] = []
            for number, event in items:
                piece = self._handle(number, event)
                if piece is None:
                    continue
                found.append(Numbered(self._index(number, piece), piece))
                if piece.finish is not None and self._orders[number].form is not None:
                    await asyncio.sleep(0)  # its form was checked, and the choices of a request may all end in one step
            if found:
                return found
        return None

    async def push(self, take: Callable[[int, ChoicePiece], bool], *, pings: bool = True) -> bool:
        """Calls `take` with the index of a choice and each of its pieces, at the moment when it comes, until every
        sequence has ended or `take` returns False. Nobody is woken for a single token. With `pings` it returns False if
        nothing came for 12 to 15 s. No order may want a form, whose check takes long.
        """

        def handle(number: int, event: Event) -> bool:
            piece = self._handle(number, event)
            goes_on = piece is None or take(self._index(number, piece), piece)
            return not goes_on or (self.generations[number].has_final and not self.is_going)

        return await self._mailbox.feed(handle, PING_S * TICKS / (TICKS + 1) if pings else None)

    async def whole(self) -> dict[int, list[ChoicePiece]]:
        """Returns the pieces of each choice, once every sequence has ended."""
        pieces: dict[int, list[ChoicePiece]] = defaultdict(list)
        if any(order.form is not None for order in self._orders):  # `more` gives way between the checks of forms
            while (found := await self.more()) is not None:
                for numbered in found:
                    pieces[numbered.index].append(numbered.piece)
            return pieces

        def take(index: int, piece: ChoicePiece) -> bool:
            pieces[index].append(piece)
            return True

        await self.push(take, pings=False)
        return pieces

    def _index(self, number: int, piece: ChoicePiece) -> int:
        """Numbers a choice over all prompts: i * n + j."""
        return number * self._orders[number].num_choices + piece.index

    def _handle(self, number: int, event: Event) -> ChoicePiece | None:
        generation = self.generations[number]
        try:
            piece = generation.handle(event)
        except errors.ApiError as error:
            failure = self._resumes.take(generation, self._prompts[number], error)
            if failure is None:
                return None
            self._failed = generation
            if failure is error:
                raise
            raise failure from None
        except Exception as fault:  # a parser's, say: it ends this request, which hears of it and is free
            self._failed = generation
            request_id = generation.order.facts.request_id
            logger.error("output_not_read", exc_info=fault, extra={"request_id": request_id})
            raise errors.internal() from None
        self._has_started = self._has_started or piece is not None
        return piece

    def postings(self) -> list[Posting]:
        """Returns the endings that `settle` is to write: they say what the answer costs. Needs all final events."""
        return [generation.posting() for generation in self.generations]

    async def settle(self, postings: Sequence[Posting], answer: bytes = b"", content_type: str | None = None) -> None:
        """Settles every request durably; after that the last event may go out. A client that leaves meanwhile changes
        nothing. Under a key, one transaction stores the answer and the postings before anything is charged. Raises
        `ApiError` if it could not be stored.
        """
        self._record.mark("finished")
        if self._key is None and len(postings) == 1:  # a task would take as long as all the rest
            settling: asyncio.Future[Any] = self.generations[0].end(postings[0], lambda settled: self._note([settled]))
            self._engine.detached.keep(settling, "settle a request")
        else:
            work = self._settle(postings, answer, content_type)
            settling = self._engine.detached.spawn(work, "settle a request")
        self._record.settling = settling
        await asyncio.shield(settling)
        if self._key is not None and not self._key.is_stored:
            raise not_stored(self._orders[0].facts.batch_id is not None)

    async def _settle(self, postings: Sequence[Posting], answer: bytes, content_type: str | None) -> None:
        if self._key is not None:
            try:
                if not await self._key.store(answer, postings, content_type):
                    postings = [generation.unstored() for generation in self.generations]
            except BaseException as error:
                # It is unknown whether the answer is stored, and so what the requests must end with.
                for generation in self.generations:
                    generation.leave()
                if isinstance(error, asyncio.CancelledError):
                    raise
                _ = self._engine.detached.spawn(self._end_late(self._key), "end a request whose answer may be stored")
                if not isinstance(error, SQLAlchemyError | OSError):
                    raise
                raise errors.unavailable("database_unavailable", "The answer cannot be stored now.") from error
        pairs = zip(self.generations, postings, strict=True)
        self._note(await asyncio.gather(*(generation.end(posting) for generation, posting in pairs)))

    def _note(self, settled: list[Settled]) -> None:
        self.settled = settled
        self._record.mark("settled")
        self._fill_record(settled, self.usage)
        if self._ended is not None and self._record.num_retries:
            _ = self._engine.detached.spawn(self._tell(self._ended), "tell of an ending")

    async def _end_late(self, key: ClaimedKey) -> None:
        """Ends the requests as SQL says, once it answers. If this gateway ends before, its next start does it."""
        kept = await key.decide([generation.order.facts.request_id for generation in self.generations])
        await asyncio.gather(
            *(one.end(kept.get(one.order.facts.request_id) or one.unstored()) for one in self.generations)
        )

    async def _tell(self, ended: Ended) -> None:
        pairs = zip(self.generations, self.settled, strict=True)
        await ended([g.order.facts.request_id for g, s in pairs if s.charge_micro_units], False)

    def hold(self) -> None:
        for generation in self.generations:
            generation.hold()

    def release(self) -> None:
        for generation in self.generations:
            generation.release()

    def fail(self, error: BaseException) -> None:
        """Called when the answer ended with an error that the client was shown: nothing is charged."""
        self._end(error)

    @property
    def usage(self) -> Usage:
        return _sum([generation.usage() for generation in self.generations])

    @property
    def billed(self) -> Usage:
        """The usage that the tenant pays for, once the run is settled; nothing before, and nothing of a free run."""
        return _sum([settled.usage for settled in self.settled])

    @property
    def num_reasoning(self) -> int:
        """The number of output tokens of `usage` that are reasoning."""
        return sum(generation.num_reasoning for generation in self.generations)

    @property
    def num_resumes(self) -> int:
        """How often another worker went on where one was lost; of several prompts, the most of one."""
        return max(generation.num_resumes for generation in self.generations)

    @property
    def shown(self) -> list[int]:
        """The numbers of the choices that the client sees, in its order."""
        return [
            number * generation.order.num_choices + index
            for number, generation in enumerate(self.generations)
            for index in generation.shown
        ]

    @property
    def budget_stop(self) -> BudgetUse | None:
        """The budget that ended one of the engine requests, or None."""
        stops = (generation.budget_stop for generation in self.generations)
        return next((stop for stop in stops if stop is not None), None)

    # Inside

    async def _start(self, order: EngineRequest, prompt: Prompt) -> None:
        """Chooses a worker and sends it the request. OPEN names the version of its weights: only a worker with the same
        ones may go on in its place.
        """
        pick = await self._engine.capacity.choose(order, prompt)
        self._record.mark("routed")
        self._engine.router.sent(pick)
        with pick.link.promised(pick.num_uncached), pick.apart:
            admitted = await self._reserved.popleft().open(pick.root)
            generation = Generation(order, admitted, self._mailbox, len(self.generations), pick)
            self.generations.append(generation)
            try:
                generation.dispatch(pick.link)
            except errors.ApiError as error:
                if self._resumes.take(generation, prompt, error) is not None:
                    raise
        self._record.worker = pick.link.registration.worker

    def _place_orders(self) -> None:
        """Decides whether workers of our own answer or capacity is bought. Raises `ApiError` 503 if nobody can."""
        placed = self._engine.capacity.placed(self._orders, self._prompts)
        if placed is not self._orders:
            self._orders, self._prompts = placed, [order.to_route() for order in placed]
            model, num_tokens = placed[0].facts.model, sum(order.facts.prompt_tokens for order in placed)
            self._record.model = model
            self._record.facts = msgspec.structs.replace(placed[0].facts, prompt_tokens=num_tokens)
        self._engine.router.check(self._engine.capacity.links(self._orders[0]), self._prompts[0])

    def _cut(self) -> None:
        self._mailbox.fail(errors.unavailable("server_draining", "The server is shutting down."))

    def _revoke(self, why: errors.ApiError) -> None:
        """Ends the run because its key ended or its tenant may not ask any more. The output until now is charged."""
        self._mailbox.fail(why)

    def _end(self, error: BaseException | None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._engine.lifecycle.on_cut.discard(self._cut)
        self._engine.running.discard(self._orders[0].principal, self._revoke)
        self._resumes.stop()
        while self._reserved:
            self._reserved.pop().release()
        left = [generation for generation in self.generations if not generation.is_over]
        for generation in self.generations:
            if generation.is_over:
                generation.close()
        if not left:
            return
        outcome = _outcome(error)
        self._record.mark(_CUTS.get(outcome, "failed"))
        for generation in left:
            generation.begin_abort()
        if outcome == "client_gone":
            self._record.disconnect_phase = "decode" if self._has_started else "queue_or_prefill"
        self._record.settling = self._engine.detached.spawn(self._abandon(left, outcome), "end a request")

    async def _abandon(self, left: list[Generation], outcome: Outcome) -> None:
        """Outlives the client: it waits for the engine's counts, then ends each engine request."""
        self._mailbox.forgive()
        with self._engine.lifecycle.running():
            try:
                async with asyncio.timeout(FINAL_S):
                    waits = outcome == "client_gone" or left[0].order.is_bought
                    while waits and any(generation.awaits_final for generation in left):
                        for number, event in await self._mailbox.take():
                            self.generations[number].note(event)
            except TimeoutError:
                pass  # the request is settled by what the gateway itself has seen
            self._record.mark("finished")
            ending = outcome
            if self._key is not None and outcome == "client_gone":
                ending = unstored(self._orders[0].facts)
            charged: list[str] = []
            endings: list[Settled] = []
            for generation in left:
                try:
                    settled = await generation.abandon(ending)
                except (SQLAlchemyError, OSError):
                    logger.exception(
                        "an ending is not written", extra={"request_id": generation.order.facts.request_id}
                    )
                    continue
                finally:
                    generation.close()
                endings.append(settled)
                if settled.charge_micro_units:
                    charged.append(generation.order.facts.request_id)
            self._record.mark("settled")
            # A client that left pays for what the engine counted. If nobody pays, the log has the output that was
            # shown.
            self.settled = endings
            self._fill_record(endings, self.billed if outcome == "client_gone" else self.usage)
            if self._ended is not None:
                await self._ended(charged, outcome == "client_gone")

    def _fill_record(self, endings: Sequence[Settled], usage: Usage) -> None:
        record = self._record
        record.usage = usage
        for settled in endings:
            record.charge_micro_units += settled.charge_micro_units
            record.currency = settled.currency
        if self.generations:
            self._show(self._failed or self._resumes.failed or self.generations[0])
        for generation in self.generations:
            if generation.num_resumes:
                continue  # no worker has counted all of it
            if generation.pick is not None and isinstance(generation.final, Finished):
                self._engine.router.ended(generation.pick, generation.final)

    def _show(self, generation: Generation) -> None:
        """Fills what the record says of one prompt alone."""
        record, pick, final = self._record, generation.pick, generation.final
        record.lease_bound, record.leases = generation.first_bound, generation.lease.marks
        record.num_received = generation.num_received
        if pick is not None:
            record.worker, record.routed = pick.link.registration.worker, pick.placement
        if final is not None:
            record.worker_timeline, record.worker_usage = final.timeline, final.usage
        if isinstance(final, Finished):
            record.cache = final.cache


def _outcome(error: BaseException | None) -> Outcome:
    if error is None or isinstance(error, asyncio.CancelledError | ConnectionError):
        return "client_gone"
    if isinstance(error, errors.ApiError) and error.code in _OUTCOMES:
        return _OUTCOMES[error.code]
    return "internal"


def _sum(usages: Sequence[Usage]) -> Usage:
    if len(usages) == 1:
        return usages[0]
    return Usage(
        sum(usage.cache_read for usage in usages),
        sum(usage.cache_write for usage in usages),
        sum(usage.uncached for usage in usages),
        sum(usage.output for usage in usages),
    )


GENERATION = web.AppKey("engine", GenerationServices)
