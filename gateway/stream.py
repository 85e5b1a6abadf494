"""All engine requests of one HTTP request, from admission to settlement, whatever becomes of the client.

`Run` is a context manager: what was admitted inside of it is settled or voided when it ends, in a task of its own
where the client has gone. Knows no JSON and no SSE.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType

from accounting.types import Outcome, Usage
from gateway import errors
from gateway.admission import Admission, Admitted, Keep, Settled
from gateway.generation import FINAL_S, ChoicePiece, Generation, Order
from gateway.lifecycle import Detached, Lifecycle
from gateway.router import Router
from gateway.telemetry.record import RequestRecord
from gateway.upstream.base import Mailbox
from gateway.upstream.fleet import Fleet
from gateway.upstream.native import WorkerLink
from workers.protocol.messages import Finished

PING_S = 15.0

_OUTCOMES: dict[str, Outcome] = {
    "upstream_lost": "worker_lost", "lease_lost": "lease_lost", "server_draining": "drain",
}  # fmt: skip


@dataclass(frozen=True)
class Engine:
    """What a run needs of the process."""

    admission: Admission
    fleet: Fleet
    router: Router
    detached: Detached
    lifecycle: Lifecycle

    def run(self, orders: Sequence[Order], record: RequestRecord) -> Run:
        return Run(self, orders, record)


@dataclass(frozen=True)
class Numbered:
    """A piece of a choice, numbered over all prompts: i * n + j."""

    index: int
    piece: ChoicePiece


class Run:
    """`async with engine.run(orders, record) as run`: admitted and dispatched; then `pieces`, then `settle`."""

    def __init__(self, engine: Engine, orders: Sequence[Order], record: RequestRecord) -> None:
        self._engine = engine
        self._orders = orders
        self._record = record
        self._mailbox = Mailbox()
        self._has_started = False
        self._has_ended = False
        self.generations: list[Generation] = []
        self.root = ""
        self.settled: list[Settled] = []

    async def __aenter__(self) -> Run:
        self._engine.lifecycle.on_cut.add(self._cut)
        try:
            link = self._choose()
            assert link.hello is not None
            self.root = link.hello.root
            for order in self._orders:
                admitted = await self._admit(order)
                self.generations.append(
                    Generation(order, admitted, self._mailbox, len(self.generations))
                )
            self._record.mark("admitted")
            for generation in self.generations:
                # Chosen anew: while this one was admitted, others were sent.
                link = self._choose()
                generation.dispatch(link)
            self._record.worker = link.registration.worker
            self._record.mark("dispatched")
        except BaseException as error:
            self._end(error)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end(error)

    @property
    def headers(self) -> dict[str, str]:
        """The limiter's answer to this very request."""
        return self.generations[-1].admitted.headers if self.generations else {}

    async def pieces(self) -> AsyncIterator[list[Numbered]]:
        """In the order of arrival, until every sequence has ended. An empty list: nothing came for 15 s."""
        while not all(generation.has_final for generation in self.generations):
            try:
                async with asyncio.timeout(PING_S):
                    items = await self._mailbox.take()
            except TimeoutError:
                yield []
                continue
            found: list[Numbered] = []
            for number, event in items:
                generation = self.generations[number]
                piece = generation.handle(event)
                if piece is not None:
                    found.append(
                        Numbered(number * generation.order.num_choices + piece.index, piece)
                    )
            if found:
                self._has_started = True
                yield found

    async def settle(self) -> list[Settled]:
        """Durable on return: now the last event may go out. A client that leaves meanwhile changes nothing."""
        self._record.mark("finished")
        self._record.settling = self._engine.detached.spawn(self._settle(), "settle a request")
        await asyncio.shield(self._record.settling)
        return self.settled

    async def _settle(self) -> None:
        endings = (generation.settle() for generation in self.generations)
        self.settled = list(await asyncio.gather(*endings))
        self._record.mark("settled")
        self._fill_record()

    def keep(self, keep: Keep) -> None:
        """Stores the answer on the way to the settlement; for a request of one sequence group."""
        (generation,) = self.generations
        generation.admitted.keep = keep

    def hold(self) -> None:
        for generation in self.generations:
            generation.hold()

    def release(self) -> None:
        for generation in self.generations:
            generation.release()

    def fail(self, error: BaseException) -> None:
        """The answer ended with an error that the client was told: nothing is charged."""
        self._end(error)

    @property
    def usage(self) -> Usage:
        return _sum([generation.usage() for generation in self.generations])

    @property
    def budget_stop(self) -> bool:
        return any(generation.budget_stop for generation in self.generations)

    # Inside

    def _choose(self) -> WorkerLink:
        fleet = self._engine.fleet
        return self._engine.router.choose(fleet.links, self._orders[0].model.id)

    async def _admit(self, order: Order) -> Admitted:
        """A client that leaves meanwhile neither interrupts the admission nor keeps what it took."""
        task = asyncio.create_task(self._engine.admission.admit(order.ask(self.root)))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            undo = _give_back(task)
            self._record.settling = self._engine.detached.spawn(undo, "give back an admission")
            raise

    def _cut(self) -> None:
        self._mailbox.fail(errors.unavailable("server_draining", "The server is shutting down."))

    def _end(self, error: BaseException | None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        self._engine.lifecycle.on_cut.discard(self._cut)
        left = [generation for generation in self.generations if not generation.is_over]
        for generation in self.generations:
            if generation.is_over:
                generation.close()
        if not left:
            return
        outcome = _outcome(error)
        for generation in left:
            generation.begin_abort()
        if outcome == "client_gone":
            self._record.disconnect_phase = "decode" if self._has_started else "queue_or_prefill"
        self._record.settling = self._engine.detached.spawn(
            self._abandon(left, outcome), "end a request"
        )

    async def _abandon(self, left: list[Generation], outcome: Outcome) -> None:
        """Outlives the client: the engine's counts, then the ending of each."""
        self._mailbox.forgive()
        with self._engine.lifecycle.running():
            try:
                async with asyncio.timeout(FINAL_S):
                    while outcome == "client_gone" and any(
                        generation.awaits_final for generation in left
                    ):
                        for number, event in await self._mailbox.take():
                            self.generations[number].note(event)
            except TimeoutError:
                pass  # settled by what the gateway itself has seen
            for generation in left:
                await generation.abandon(outcome)
                generation.close()
            self._fill_record()

    def _fill_record(self) -> None:
        record = self._record
        record.usage = self.usage
        for settled in self.settled:
            record.charge_micro_units += settled.charge_micro_units
            record.currency = settled.currency
        final = self.generations[0].final if self.generations else None
        if isinstance(final, Finished):
            record.worker_timeline = final.timeline


def _outcome(error: BaseException | None) -> Outcome:
    if error is None or isinstance(error, asyncio.CancelledError | ConnectionError):
        return "client_gone"
    if isinstance(error, errors.ApiError) and error.code in _OUTCOMES:
        return _OUTCOMES[error.code]
    return "internal"


async def _give_back(task: asyncio.Task[Admitted]) -> None:
    try:
        admitted = await task
    except errors.ApiError:
        return
    await admitted.void("client_gone")


def _sum(usages: Sequence[Usage]) -> Usage:
    return Usage(
        sum(usage.cache_read for usage in usages),
        sum(usage.cache_write for usage in usages),
        sum(usage.uncached for usage in usages),
        sum(usage.output for usage in usages),
    )
