"""Runs one response in the background: it is claimed in SQL, and its events and its end are written there.

The run belongs to this process and to nobody's connection. If the process ends, the claim does too, and a jobs process
asks a gateway to run the response anew. A run whose end is not stored is free, and so is one that lost its claim; one
that was cancelled is charged as a request whose client has left. A run of which SQL refuses a row fails: another one
would be refused, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from aiohttp import web
from sqlalchemy.exc import SQLAlchemyError

from accounting.batches.claims import now_ms
from accounting.database.db import is_rows_fault
from accounting.responses import runs
from accounting.responses.runs import Claim, Packet
from accounting.responses.stored import State
from gateway.base import errors, ids
from gateway.base.app_keys import DATABASE, LIFECYCLE
from gateway.generation.reply import AnswerPlan, ending_of
from gateway.generation.stream import GENERATION, GenerationGroup
from gateway.metering.endings import Settled
from gateway.responses import store
from gateway.responses.texts import ResponseTexts
from gateway.telemetry.keys import OBSERVERS, RECORD, TRACING
from gateway.telemetry.record import RequestRecord
from gateway.writers.responses import Bill, ResponseWriter, failed_fields, usage_of
from workers.process.logs import HANDLED

logger = logging.getLogger(__name__)

FLUSH_S = 0.5
"""The time after which events are stored, and an order to stop is heard."""
MAX_LOST = 10
"""The most runs of one response that this process loses."""
MAX_WAIT_S = 3_600
"""The age at which a response that is refused, or loses its worker, fails."""
WAIT_SHARE, MAX_PAUSE_S = 1 / 8, 60
"""The time between two tries, as a share of the age, and the longest one."""
ROUTE = "/v1/responses"


@dataclass(frozen=True)
class Planned:
    """A run that may begin. Its request has its own record, and so its own id in the ledger."""

    request: web.Request
    plan: AnswerPlan
    writer: ResponseWriter
    texts: ResponseTexts


Planner = Callable[[web.Request, Claim], Awaitable[Planned]]


def own_request(request: web.Request) -> web.Request:
    """Returns a copy of a request that outlives it, with a new record."""
    own = request.clone()
    record = own[RECORD] = RequestRecord(ids.request_id(), "POST", route=ROUTE)
    record.mark("accepted")
    record.background = "run"
    record.principal, record.peer, record.status = request[RECORD].principal, request[RECORD].peer, 200
    own.app[TRACING].start(record)
    return own


async def run(request: web.Request, response_id: str, planner: Planner, first: Planned | None = None) -> None:
    """Runs the response until it has an end, or until this process stops. `first` is the plan of the first run."""
    app = request.app
    lifecycle = app[LIFECYCLE]
    HANDLED.set(request[RECORD])
    num_lost = 0
    while not lifecycle.draining.is_set():
        with lifecycle.running():
            try:
                pause = await _run_once(request, response_id, planner, first, num_lost)
            except (SQLAlchemyError, OSError) as error:
                logger.warning("a response is run again once its claim has ended: %s", error)
                return
        if pause is None:
            return
        first = None
        num_lost += pause.is_lost
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause.wait_ms / 1000):
                await lifecycle.draining.wait()


async def _run_once(
    request: web.Request, response_id: str, planner: Planner, first: Planned | None, num_lost: int
) -> Pause | None:
    """Returns the time until the response is tried again, or None. Raises what SQL raises."""
    async with request.app[DATABASE].write() as conn:
        claim = await runs.claim(conn, response_id, await now_ms(conn))
    if claim is None:
        return None
    own = first.request if first is not None else own_request(request)
    HANDLED.set(own[RECORD])
    one: _Run | None = None
    try:
        if claim.response.is_stopping:  # the run before this one ended before it wrote that it was cancelled
            await _end(own, claim, "cancelled", {}, claim.response.next_number)
            return None
        one = _Run(first or await planner(own, claim), claim)
        await one.run()
        return None
    except Exception as fault:  # an unexpected one would come again with each run, for ever
        if isinstance(fault, SQLAlchemyError | OSError) and not is_rows_fault(fault):
            raise
        if isinstance(fault, errors.ApiError):
            error = fault
        else:
            error = errors.internal()
            logger.error("background_run_failed", exc_info=fault, extra={"response": response_id})
        own[RECORD].error_code = error.code or error.type
        pause = pause_after(error, time.time() - claim.response.created_at, num_lost)
        if pause is None:
            await _end_failed(own, claim, one, error)
            return None
        async with request.app[DATABASE].write() as conn:
            await runs.release(conn, claim, await now_ms(conn) + pause.wait_ms)
        return pause
    finally:
        own[RECORD].mark("last_byte")
        request.app[OBSERVERS].publish(own[RECORD])


async def _end_failed(request: web.Request, claim: Claim, one: _Run | None, error: errors.ApiError) -> None:
    """Writes the failure with the output so far, or without it if there is none or SQL refuses it."""
    if one is None:
        await _fail(request, claim, error, claim.response.next_number)
        return
    try:
        await one.fail(error)
    except SQLAlchemyError as fault:
        if not is_rows_fault(fault):
            raise
        logger.error("background_output_refused", exc_info=fault, extra={"response": claim.response.id})
        await _fail(request, claim, error, one.next_number)


async def _fail(request: web.Request, claim: Claim, error: errors.ApiError, number: int) -> None:
    """Writes the failure of a response without output, such as one whose key has ended."""
    await _end(request, claim, "failed", failed_fields(error, request[RECORD].request_id), number)


async def _end(request: web.Request, claim: Claim, state: State, fields: dict[str, Any], number: int) -> None:
    """Writes the end of a response without output. `fields` are changed in its body; `number` is that of its event."""
    texts, row = await store.texts_of(request), claim.response
    assert row.body is not None
    body = texts.decoded(row.id, "body", row.body) | {"status": state, **fields}
    event = {"type": f"response.{state}", "response": body, "sequence_number": number}
    data = msgspec.json.encode(body)
    async with request.app[DATABASE].write() as conn:
        sealed, packet = texts.pack(row.id, "body", data), packet_of(texts, row.id, [event])
        await runs.finish(conn, claim, state, sealed, packet, number + 1, len(data))


@dataclass(frozen=True)
class Pause:
    """The time between a run that was refused or lost and the next one."""

    wait_ms: int
    is_lost: bool = False


def pause_after(error: errors.ApiError, age_s: float, num_lost: int) -> Pause | None:
    """Decides when a response of this age runs again after the error; None if never. A fleet may start for minutes,
    so what was refused waits long; a run that was lost has cost something, and the request itself may be the reason.
    """
    if error.code == "server_draining":
        return Pause(0)
    if error.status not in (429, 503) or error.headers.get("x-should-retry") == "false":
        return None
    is_lost = error.code == "upstream_lost"
    if age_s > MAX_WAIT_S or num_lost + is_lost > MAX_LOST:
        return None
    wait_s = min(max(1, age_s * WAIT_SHARE), MAX_PAUSE_S)
    return Pause(max(int(wait_s * 1000), int(error.headers.get("retry-after-ms", "0"))), is_lost)


class _Run:
    def __init__(self, planned: Planned, claim: Claim) -> None:
        self._request = planned.request
        self._plan = planned.plan
        self._writer = planned.writer
        self._texts = planned.texts
        self._claim = claim
        self._record: RequestRecord = planned.request[RECORD]
        self._events: list[Any] = []
        self._has_ended = asyncio.Event()
        self._verdict: Literal["cancelled", "lost"] | None = None
        self._refusal: SQLAlchemyError | None = None
        """SQL will never take the events of this run."""
        self._group: GenerationGroup | None = None

    @property
    def next_number(self) -> int:
        """The number of the next event."""
        return self._writer.next_number

    async def run(self) -> None:
        """Raises `ApiError`, or what SQL raises, if the run failed; it is free then."""
        self._record.stream = True
        self._record.asked = self._plan.orders[0].asked(1)
        # The numbers of a run's events follow those of the wait, or of an earlier run that sent more.
        number = self._claim.response.next_number
        self._writer.go_on(number, is_open=number <= runs.NUM_WAITING)
        group = self._request.app[GENERATION].run(self._plan.orders, self._record)
        self._group = group
        try:
            async with group as run:
                await self._generate(run)
        except asyncio.CancelledError:
            if self._verdict is None:
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            await self._stopped(group)
            if self._refusal is not None:
                raise self._refusal from None

    async def _generate(self, run: GenerationGroup) -> None:
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(self._watch(task, run))
        try:
            has_begun = False
            while (found := await run.more()) is not None:
                if found and not has_begun:
                    has_begun = True
                    self._record.mark("first_byte")
                    self._events += self._writer.opening(run.root)
                self._events += self._writer.of(found)
                self._record.finish_reasons = tuple(n.piece.finish for n in found if n.piece.finish is not None)
            if not has_begun:
                raise errors.internal()
        finally:
            self._has_ended.set()
            await watch
        postings = run.postings()
        ending = ending_of(self._plan, run, [Settled.of(posting) for posting in postings])
        body = self._writer.whole(run.root, [], ending)
        if not await self._finish(body, self._writer.closing(ending)) and not await self._is_gone():
            raise errors.internal()
        await run.settle(postings)

    async def fail(self, error: errors.ApiError) -> None:
        """Writes the failure. A run that ended with its key has been charged, and says so."""
        await self._has_settled()
        body, events = self._writer.ended(error, self._record.request_id, self._bill())
        await self._finish(body, events)

    def _bill(self) -> Bill | None:
        group = self._group
        if group is None or not group.billed.total:
            return None
        charge, currency = self._record.charge_micro_units, self._record.currency
        return Bill(
            usage_of(group.billed, min(group.num_reasoning, group.billed.output)),
            {"charge_micro_units": charge, "currency": currency},
        )

    async def _has_settled(self) -> None:
        """Waits for the settlement of a run that did not end by itself."""
        if self._record.settling is not None:
            await asyncio.shield(self._record.settling)

    async def _stopped(self, group: GenerationGroup) -> None:
        """Waits for the settlement of a run that was stopped, and writes what it cost."""
        await self._has_settled()
        if self._verdict == "cancelled":
            body, events = self._writer.cancelled(self._record.usage, group.num_reasoning)
            await self._finish(body, events)

    async def _watch(self, task: asyncio.Task[Any], run: GenerationGroup) -> None:
        """Stores events as they come, and cancels the task once the run may not go on. One that lost its claim is free:
        whoever has the claim now is charged.
        """
        while not self._has_ended.is_set():
            try:
                async with asyncio.timeout(FLUSH_S):
                    await self._has_ended.wait()
            except TimeoutError:
                pass
            try:
                state = await self._flush()
            except (SQLAlchemyError, OSError) as error:
                if not isinstance(error, SQLAlchemyError) or not is_rows_fault(error):
                    logger.warning("the events of a response are not stored yet: %s", error)
                    continue
                self._refusal, state = error, None
            if state != "in_progress" and not self._has_ended.is_set():
                self._verdict = "cancelled" if state == "cancelled" else "lost"
                if self._verdict == "lost":
                    run.fail(errors.internal())
                task.cancel()
                return

    async def _flush(self) -> State | None:
        events, number = list(self._events), self._writer.next_number  # the run adds more while SQL is asked
        async with self._request.app[DATABASE].write() as conn:
            state = await runs.write(conn, self._claim, self._packet(events), number, await now_ms(conn))
        self._events = self._events[len(events) :]
        return state

    async def _is_gone(self) -> bool:
        """Returns whether the client took the response back in the run's last moments. Then the run is paid for, as one
        that hears of it in time is: its events could be read all the while.
        """
        async with self._request.app[DATABASE].read() as conn:
            return await runs.is_gone(conn, self._claim)

    async def _finish(self, body: dict[str, Any], events: Sequence[Any]) -> bool:
        """Stores the end of the response. Returns False if this run may not write it."""
        events = [*self._events, *events]
        data, sealed, packet = await asyncio.to_thread(_sealed, self._texts, body, events)
        number = events[-1]["sequence_number"] + 1
        async with self._request.app[DATABASE].write() as conn:
            return await runs.finish(conn, self._claim, body["status"], sealed, packet, number, len(data))

    def _packet(self, events: Sequence[Any]) -> Packet | None:
        return packet_of(self._texts, self._claim.response.id, events)


def _sealed(texts: ResponseTexts, body: dict[str, Any], events: Sequence[Any]) -> tuple[bytes, bytes, Packet | None]:
    """Returns a Response object as JSON and as it is stored, and its last events as they are stored."""
    data = msgspec.json.encode(body)
    return data, texts.pack(body["id"], "body", data), packet_of(texts, body["id"], events)


def packet_of(texts: ResponseTexts, response_id: str, events: Sequence[Any]) -> Packet | None:
    if not events:
        return None
    return Packet(events[0]["sequence_number"], texts.pack(response_id, "events", msgspec.json.encode(events)))
