"""Makes the tree of spans from the record of an ended request. Pure: no clock, no ids, no export.

All times are the record's: wall clock of the acceptance plus monotonic offsets. The worker's events are offsets on its
own clock; they are placed inside the `chat` span, and clocks of two hosts are never subtracted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.telemetry import names
from gateway.telemetry.record import Mark, RequestRecord
from workers.protocol.messages import TimelineEvent

Kind = Literal["server", "client", "internal"]


@dataclass(slots=True)
class PlannedSpan:
    name: str
    kind: Kind
    start_ns: int
    end_ns: int
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, int, dict[str, Any]]] = field(default_factory=list)
    error: str = ""
    """The error's code. It is empty if there is no failure of ours."""
    children: list[PlannedSpan] = field(default_factory=list)


def plan(record: RequestRecord) -> PlannedSpan:
    """Returns the SERVER span with everything below it."""
    marks = _Marks(record)
    root = PlannedSpan(f"{record.method} {record.route}", "server", record.started_ns, marks.end, _server(record))
    root.error = _error(record)
    root.events = [(name, marks.at[name], {}) for name in ("authenticated", "tokenized") if name in marks.at]
    chat = _chat(record, marks)
    below = (_admit(record, marks), chat, _settle(record, marks, chat))
    root.children = [span for span in below if span is not None]
    return root


def failed(record: RequestRecord) -> bool:
    """Returns whether the request failed through our fault; a client's mistake is no failure."""
    return record.status >= 500 or record.outcome == "server_error"


class _Marks:
    """The first mark of each name in Unix nanoseconds, and the end of the request."""

    def __init__(self, record: RequestRecord) -> None:
        self.at: dict[Mark, int] = {}
        for name, offset in record.marks:
            self.at.setdefault(name, record.started_ns + offset)
        self.end = self.at.get("last_byte", max(self.at.values(), default=record.started_ns))

    def first(self, *wanted: Mark) -> int | None:
        return next((self.at[name] for name in wanted if name in self.at), None)


def _server(record: RequestRecord) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        names.HTTP_METHOD: record.method,
        names.HTTP_ROUTE: record.route,
        names.HTTP_STATUS: record.status,
        names.REQUEST_ID: record.request_id,
        names.TIER: record.tier,
    }
    if record.principal is not None:
        attributes[names.TENANT_ID] = record.principal.tenant_id
        attributes[names.API_KEY_ID] = record.principal.key_id
        attributes[names.BATCH_ID] = record.principal.batch_id
    if record.error_code:
        attributes[names.ERROR_TYPE] = record.error_code
    return _given(attributes)


def _admit(record: RequestRecord, marks: _Marks) -> PlannedSpan | None:
    """Returns the span from the counted prompt to the admission, or to the refusal, which carries the code of the limit
    that decided.
    """
    start = marks.first("tokenized")
    if start is None:
        return None
    yes = marks.first("admitted")
    attributes = {} if yes else _given({names.ERROR_TYPE: record.error_code})
    return PlannedSpan(names.ADMIT, "internal", start, yes or marks.end, attributes)


def _chat(record: RequestRecord, marks: _Marks) -> PlannedSpan | None:
    start = marks.first("dispatched")
    operation = names.OPERATIONS.get(record.route)
    if start is None or operation is None:
        return None
    timeline = record.worker_timeline
    lasted = max((event.offset_us for event in timeline), default=0) * 1000
    end = min(marks.first("finished") or start + lasted, marks.first("settled") or marks.end)
    end = max(start, end if timeline or "finished" in marks.at else marks.end)
    span = PlannedSpan(f"{operation} {record.model}", "client", start, end, _genai(record, marks, operation))
    span.error = _error(record)
    place = _Placed(start, end)
    span.events = [
        (event.name, place(event), _given({names.STEP: event.step if event.step >= 0 else None}))
        for event in timeline
        if event.name in ("first_token", "preempted", "resumed", "parked", "thinned")
    ]
    span.children = _phases(timeline, place)
    return span


def _genai(record: RequestRecord, marks: _Marks, operation: str) -> dict[str, Any]:
    usage = record.usage
    first = marks.first("first_byte")
    return _given(
        {
            names.OPERATION_NAME: operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: record.model,
            names.REQUEST_STREAM: record.stream,
            **{
                names.REQUEST_PREFIX + name: value
                for name, value in record.params.items()
                if name in names.REQUEST_PARAMS and isinstance(value, int | float)
            },
            names.RESPONSE_ID: record.request_id,
            names.RESPONSE_MODEL: record.model,
            names.FINISH_REASONS: record.finish_reasons or None,
            names.TIME_TO_FIRST_CHUNK: (first - record.started_ns) / 1e9 if first and record.stream else None,
            names.INPUT_TOKENS: usage.prompt,
            names.OUTPUT_TOKENS: usage.output,
            names.CACHE_READ_TOKENS: usage.cache_read,
            names.CACHE_WRITE_TOKENS: usage.cache_write,
            names.WORKER_ID: record.worker or None,
            names.ATTEMPT: record.attempt,
            names.PREEMPTIONS: sum(e.name == "preempted" for e in record.worker_timeline),
        }
    )


class _Placed:
    """Places a worker's event inside [start, end]."""

    def __init__(self, start: int, end: int) -> None:
        self._start, self._end = start, end

    def __call__(self, event: TimelineEvent) -> int:
        return min(self._start + max(0, event.offset_us) * 1000, self._end)


def _phases(timeline: tuple[TimelineEvent, ...], place: _Placed) -> list[PlannedSpan]:
    at: dict[str, int] = {}
    for event in timeline:
        at.setdefault(event.name, place(event))
    edges = ("queued", "matched", "first_token", "finished")
    spans = []
    for name, first, last in zip((names.QUEUE, names.PREFILL, names.DECODE), edges, edges[1:], strict=False):
        if first in at:
            # A request that ended early has no later event: its present phase lasts to the end.
            end = at.get(last, at.get("finished", at[first]))
            spans.append(PlannedSpan(name, "internal", at[first], max(at[first], end)))
    for span in spans:
        if span.name == names.QUEUE:
            span.attributes[names.QUEUE_WAIT_S] = (span.end_ns - span.start_ns) / 1e9
        if span.name == names.PREFILL:
            span.events = [
                ("chunk", place(e), {names.STEP: e.step, names.NUM_TOKENS: e.num_tokens})
                for e in timeline
                if e.name == "chunk"
            ]
    return spans


def _settle(record: RequestRecord, marks: _Marks, chat: PlannedSpan | None) -> PlannedSpan | None:
    end = marks.first("settled")
    if end is None:
        return None
    start = chat.end_ns if chat else end
    return PlannedSpan(names.SETTLE, "internal", min(start, end), end, {names.CHARGE: record.charge_micro_units})


def _error(record: RequestRecord) -> str:
    return (record.error_code or str(record.status)) if failed(record) else ""


def _given(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None and value != ""}
