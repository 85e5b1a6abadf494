"""A request after its text has become ids: run it, and write the answer as one body or as a stream of chunks.

The rules of streams are api.md 4.3. The last event waits for the settlement; a failure before the first event is a
plain HTTP error, afterwards an event and an end without `[DONE]`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from accounting.types import Posting
from gateway import errors, ids
from gateway.admission import Settled
from gateway.claimed_key import ClaimedKey, line_ended
from gateway.generation import ChoicePiece, Order
from gateway.keys import CLAIMED_KEY, ENGINE, RECORD, SETTINGS
from gateway.models import fingerprint
from gateway.schema.replies import Shape, headgate_of, usage_of
from gateway.schema.sampling import SamplingFields
from gateway.sse import EventStream
from gateway.stream import Numbered, Run


@dataclass(frozen=True)
class Plan:
    """Everything the engine and the answer need to know of a checked request."""

    fields: SamplingFields
    orders: Sequence[Order]
    shape: Shape
    ignored: Sequence[str] = ()
    before_text: Callable[[Run], None] = lambda run: None
    """Called once the first pieces are there: the prompt's logprobs are known then."""

    @property
    def num_choices(self) -> int:
        return len(self.orders) * self.fields.num_choices


@dataclass
class Envelope:
    """The constant part of a body or of each chunk."""

    plan: Plan
    root: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = ids.object_id(self.plan.shape.id_prefix)

    def make(self, kind: str, choices: list[Any], **more: Any) -> dict[str, Any]:
        fields = self.plan.fields
        envelope = {
            "id": self.id, "object": kind, "created": self.created, "model": fields.model,
            "system_fingerprint": fingerprint(self.root), "choices": choices,
        }  # fmt: skip
        if fields.service_tier is not None:
            envelope["service_tier"] = "default"
        if fields.metadata is not None:
            envelope["metadata"] = fields.metadata
        return envelope | more

    def chunk(self, choices: list[Any], **more: Any) -> dict[str, Any]:
        if self.plan.fields.include_usage:
            more.setdefault("usage", None)
        return self.make(self.plan.shape.chunk_object, choices, **more)


async def answer(request: web.Request, plan: Plan) -> web.StreamResponse:
    record = request[RECORD]
    record.stream = bool(plan.fields.stream)
    async with request.app[ENGINE].run(plan.orders, record) as run:
        headers = dict(run.headers)
        if plan.ignored:
            headers["x-headgate-ignored"] = ", ".join(plan.ignored)
        if plan.fields.stream:
            return await _stream(request, plan, run, headers)
        return await _body(request, plan, run, headers)


async def _body(
    request: web.Request, plan: Plan, run: Run, headers: dict[str, str]
) -> web.Response:
    envelope = Envelope(plan, run.root)
    pieces: dict[int, list[ChoicePiece]] = defaultdict(list)
    async for found in run.pieces():
        for numbered in found:
            pieces[numbered.index].append(numbered.piece)
    plan.before_text(run)
    choices = [plan.shape.whole(index, pieces[index]) for index in range(plan.num_choices)]

    def whole(settled: Sequence[Settled]) -> bytes:
        ending = _ending(request, plan, run, settled)
        return msgspec.json.encode(envelope.make(plan.shape.body_object, choices, **ending))

    await _settle(request, run, whole)
    if run.budget_stop:
        headers["x-headgate-stop"] = "budget"
    _note_finishes(request, [choice["finish_reason"] for choice in choices])
    return web.Response(body=whole(run.settled), content_type="application/json", headers=headers)


async def _settle(
    request: web.Request, run: Run, whole: Callable[[Sequence[Settled]], bytes]
) -> None:
    """The answer of a request with a key is stored on the way; if it cannot be any more, there is none."""
    key: ClaimedKey | None = request.get(CLAIMED_KEY)
    if key is None:
        await run.settle()
        return

    async def keep(posting: Posting) -> bool:
        return await key.store(whole([Settled.of(posting)]), posting)

    run.keep(keep)
    await run.settle()
    if not key.is_stored:
        raise line_ended()


async def _stream(
    request: web.Request, plan: Plan, run: Run, headers: dict[str, str]
) -> web.StreamResponse:
    stream = EventStream(request, request.app[SETTINGS].write_timeout_s, run.hold, run.release)
    envelope = Envelope(plan, run.root)
    chunks = _Chunks(plan, envelope)
    try:
        async for found in run.pieces():
            if stream.response is None:
                if not found:
                    continue
                plan.before_text(run)
                await stream.start(headers)
                await stream.send(*chunks.opening())
            if found:
                await stream.send(*chunks.of(found))
            else:
                await stream.ping()
        if stream.response is None:  # no choice said anything, not even its end
            raise errors.internal()
        ending = _ending(request, plan, run, await run.settle())
    except errors.ApiError as error:
        if stream.response is None:
            raise
        return await _fail(request, stream, run, error)
    _note_finishes(request, chunks.finishes)
    await stream.send(*chunks.closing(**ending))
    return await stream.end()


def _ending(
    request: web.Request, plan: Plan, run: Run, settled: Sequence[Settled]
) -> dict[str, Any]:
    order = plan.orders[0]
    final = run.generations[0].final
    return {
        "usage": usage_of(run.usage),
        "headgate": headgate_of(
            request[RECORD].request_id, order.tier, settled, final, run.budget_stop
        ),
    }


async def _fail(
    request: web.Request, stream: EventStream, run: Run, error: errors.ApiError
) -> web.StreamResponse:
    """One error event and a clean end of the body: who overlooks it sees neither `[DONE]` nor a finish."""
    request[RECORD].error_code = error.code or error.type
    run.fail(error)
    event = {
        "type": error.type, "code": error.code, "message": error.message, "param": error.param,
        "request_id": request[RECORD].request_id, "retryable": error.status == 503,
    }  # fmt: skip
    await stream.send({"error": event})
    return await stream.end(done=False)


def _note_finishes(request: web.Request, finishes: Sequence[str | None]) -> None:
    request[RECORD].finish_reasons = tuple(finish or "" for finish in finishes)


class _Chunks:
    """Pieces → chunks. The last end of all is kept back: it goes out with the settlement."""

    def __init__(self, plan: Plan, envelope: Envelope) -> None:
        self._plan = plan
        self._envelope = envelope
        self._num_open = plan.num_choices
        self._last: dict[str, Any] | None = None
        self.finishes: list[str | None] = []

    def opening(self) -> list[dict[str, Any]]:
        choices = (self._plan.shape.opening(index) for index in range(self._plan.num_choices))
        return [self._envelope.chunk([choice]) for choice in choices if choice is not None]

    def of(self, found: Sequence[Numbered]) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        for numbered in found:
            index, piece = numbered.index, numbered.piece
            if piece.piece.text or piece.piece.entries:
                chunks.append(self._envelope.chunk([self._plan.shape.part(index, piece)]))
            if piece.finish is not None:
                self._num_open -= 1
                self.finishes.append(piece.finish)
                closing = self._plan.shape.closing(index, piece)
                if self._num_open:
                    chunks.append(self._envelope.chunk([closing]))
                else:
                    self._last = closing
        return chunks

    def closing(self, *, usage: dict[str, Any], headgate: dict[str, Any]) -> list[dict[str, Any]]:
        if not self._plan.fields.include_usage:
            return [self._envelope.chunk([self._last], headgate=headgate)]
        return [
            self._envelope.chunk([self._last]),
            self._envelope.chunk([], usage=usage, headgate=headgate),
        ]
