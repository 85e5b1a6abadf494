"""A request whose text has become ids: this module runs it, and writes the answer as one body or as a stream of events.

A `Writer` says what they look like. The rules of streams are in api.md 4.3. The last event waits for the settlement. A
failure before the first event is a plain HTTP error; a later one is an event and an end without `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from gateway.base import errors
from gateway.base.app_keys import SETTINGS
from gateway.generation.engine_request import EngineRequest
from gateway.generation.generation import ChoicePiece
from gateway.generation.headgate_object import headgate_of
from gateway.generation.stream import GENERATION, Ended, GenerationGroup, Numbered
from gateway.generation.writer import Ending, Writer
from gateway.http.sse import CONTENT_TYPE, EventStream, KeptStream
from gateway.idempotency.claimed_key import CLAIMED_KEY
from gateway.idempotency.retries import RETRIES, SDK_RETRY
from gateway.metering.endings import Settled
from gateway.schema.sampling import SamplingFields
from gateway.telemetry.keys import RECORD

T = TypeVar("T")


class Work(Protocol):
    """Runs a function whose cost grows with `num_entries`, the number of logprob entries."""

    def __call__(self, num_entries: int, function: Callable[[], T]) -> Awaitable[T]: ...


async def inline(num_entries: int, function: Callable[[], T]) -> T:
    return function()


class AnswerPlan(msgspec.Struct, frozen=True):
    """A checked request, with everything that the engine and the answer need of it."""

    fields: SamplingFields
    orders: Sequence[EngineRequest]
    writer: Writer
    ignored: Sequence[str] = ()
    before_text: Callable[[GenerationGroup, Sequence[int]], Awaitable[None]] | None = None
    """Called with the numbers of prompts once each has its first piece: its logprobs are known then."""
    work: Work = inline
    keep: Callable[[Ending], Awaitable[None]] | None = None
    """Stores the answer before it is settled. If it raises, the request fails and is free."""

    @property
    def num_choices(self) -> int:
        return len(self.orders) * self.fields.num_choices

    @property
    def pushes(self) -> bool:
        """Whether a stream may send each piece where it comes. Those of several choices are gathered for one write, and a
        form is checked beside other work.
        """
        (first, *others) = self.orders
        return not others and first.num_choices == 1 and first.form is None and self.before_text is None


async def answer(request: web.Request, plan: AnswerPlan) -> web.StreamResponse:
    record = request[RECORD]
    record.stream = bool(plan.fields.stream)
    record.asked = plan.orders[0].asked(len(plan.orders))
    async with request.app[GENERATION].run(plan.orders, record, request.get(CLAIMED_KEY), ended_of(request)) as run:
        headers = dict(run.headers)
        if plan.ignored:
            headers["x-headgate-ignored"] = ", ".join(plan.ignored)
        if (model := plan.orders[0].model).instead_of:
            headers["x-headgate-fallback"] = model.id
        if plan.fields.stream:
            return await _stream(request, plan, run, headers)
        return await _body(request, plan, run, headers)


def ended_of(request: web.Request) -> Ended | None:
    """Returns the function that reports the ending, so that a repeat by an SDK is recognised."""
    attempt = request.get(SDK_RETRY)
    if attempt is None:
        return None
    record = request[RECORD]

    async def tell(charged: Sequence[str], has_left: bool) -> None:
        unheard = has_left and record.offset_ms("first_byte") is None
        await request.app[RETRIES].ended(attempt, charged, unheard=unheard)

    return tell


async def _body(request: web.Request, plan: AnswerPlan, run: GenerationGroup, headers: dict[str, str]) -> web.Response:
    pieces = await run.whole()
    if plan.before_text is not None:
        await plan.before_text(run, range(len(plan.orders)))
    choices = await _choices(plan, [pieces[drawn] for drawn in run.shown])

    def whole(settled: Sequence[Settled]) -> bytes:
        return msgspec.json.encode(plan.writer.whole(run.root, choices, ending_of(plan, run, settled)))

    await settle(request, run, whole, keep=_keep_of(plan, run))
    if run.budget_stop is not None:
        headers["x-headgate-stop"] = "budget"
    _note_finishes(request, [pieces[drawn][-1].finish for drawn in run.shown])
    return web.Response(body=whole(run.settled), content_type="application/json", headers=headers)


async def _choices(plan: AnswerPlan, shown: Sequence[Sequence[ChoicePiece]]) -> list[Any]:
    num_each = 1 + plan.orders[0].sampling.logprobs  # 0 without logprobs
    return [
        await plan.work(
            sum(len(piece.piece.entries) for piece in pieces) * num_each, partial(plan.writer.choice, index, pieces)
        )
        for index, pieces in enumerate(shown)
    ]


async def settle(
    request: web.Request,
    run: GenerationGroup,
    whole: Callable[[Sequence[Settled]], bytes],
    content_type: str | None = None,
    keep: Callable[[Sequence[Settled]], Awaitable[None]] | None = None,
) -> None:
    """Settles the run. Under an idempotency key the whole answer, which says what it costs, is stored with it. `keep`
    stores the answer before it is charged.
    """
    postings = run.postings()
    settled = [Settled.of(posting) for posting in postings]
    if keep is not None:
        await keep(settled)
    answer = whole(settled) if CLAIMED_KEY in request else b""
    await run.settle(postings, answer, content_type)


def _keep_of(plan: AnswerPlan, run: GenerationGroup) -> Callable[[Sequence[Settled]], Awaitable[None]] | None:
    keep = plan.keep
    return None if keep is None else lambda settled: keep(ending_of(plan, run, settled))


async def _stream(
    request: web.Request, plan: AnswerPlan, run: GenerationGroup, headers: dict[str, str]
) -> web.StreamResponse:
    kind = KeptStream if CLAIMED_KEY in request else EventStream
    writer = plan.writer
    stream = kind(request, request.app[SETTINGS].write_timeout_s, run.hold, run.release, writer.style)
    finishes: list[str] = []

    def closing(settled: Sequence[Settled]) -> list[Any]:
        return writer.closing(ending_of(plan, run, settled))

    def whole(settled: Sequence[Settled]) -> bytes:
        assert isinstance(stream, KeptStream)
        return stream.whole(*closing(settled))

    def push(index: int, piece: ChoicePiece) -> bool:
        if piece.finish is not None:
            finishes.append(piece.finish)
        return stream.push(*writer.of([Numbered(index, piece)]))

    has_begun = False
    waiting = set(range(len(plan.orders)))
    """The prompts without a piece."""
    pushes = stream.can_push and plan.pushes
    try:
        while not (has_begun and pushes) and (found := await run.more()) is not None:
            if plan.before_text is not None:
                new = waiting & {numbered.index // plan.orders[0].num_choices for numbered in found}
                if new:
                    waiting -= new
                    await plan.before_text(run, sorted(new))
            if stream.response is None:
                request[RECORD].is_waiting = not found
                await stream.start(headers)
            if not found:
                await stream.ping()
                continue
            opening: list[Any] = []
            if not has_begun:
                has_begun = True
                if request[RECORD].is_waiting:
                    request[RECORD].mark("first_byte")
                opening = writer.opening(run.root)
            await stream.send(*opening, *writer.of(found))
            finishes += [numbered.piece.finish for numbered in found if numbered.piece.finish is not None]
        if not has_begun:  # no choice produced anything, not even its end
            raise errors.internal()
        while run.is_going:  # each further piece is sent where it comes
            if not await run.push(push):
                await stream.ping()
            if not finishes:  # what has finished is settled, whether its client reads or not
                await stream.room()
        await settle(request, run, whole, CONTENT_TYPE, _keep_of(plan, run))
    except errors.ApiError as error:
        if stream.response is None:
            raise
        return await _fail(request, plan, stream, run, error)
    _note_finishes(request, finishes)
    return await stream.close(*closing(run.settled))


def ending_of(plan: AnswerPlan, run: GenerationGroup, settled: Sequence[Settled]) -> Ending:
    facts = plan.orders[0].facts
    final = run.generations[0].final
    volatile = plan.orders[0].volatile
    headgate = headgate_of(facts.request_id, facts.tier, settled, final, run.budget_stop, volatile, run.num_resumes)
    if (model := plan.orders[0].model).instead_of:
        headgate |= {"model": model.id, "fallback_from": model.instead_of}
    if (billed := run.generations[0].order.facts.model) != model.id:
        headgate["billed_as"] = billed
    return Ending(run.usage, run.num_reasoning, headgate)


async def _fail(
    request: web.Request, plan: AnswerPlan, stream: EventStream, run: GenerationGroup, error: errors.ApiError
) -> web.StreamResponse:
    """Sends the events of a failure and ends the body cleanly, without `[DONE]`."""
    request[RECORD].error_code = error.code or error.type
    run.fail(error)
    return await stream.close(*plan.writer.failed(error, request[RECORD].request_id), done=False)


def _note_finishes(request: web.Request, finishes: Sequence[str | None]) -> None:
    request[RECORD].finish_reasons = tuple(finish or "" for finish in finishes)
