"""Makes the tree of spans from the record of an ended request. It is pure: it has no clock, draws no ids and exports
nothing.

All times are the record's: wall clock of the acceptance plus monotonic offsets. The worker's events are offsets on its
own clock; they are placed inside the `chat` span, and clocks of two hosts are never subtracted. docs/observability.md
has the table of spans; a test compares it with what is made here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Literal

from accounting.values import timelines
from accounting.values.timelines import Event, Phase
from gateway.telemetry import names
from gateway.telemetry.record import Asked, Cut, Mark, RequestRecord

Kind = Literal["server", "client", "internal"]

CUTS: tuple[Cut, ...] = ("client_gone", "worker_lost", "lease_lost", "drained", "failed")
SERVER_EVENTS: tuple[Mark, ...] = ("authenticated", "grammar", "tokenized", "first_byte")
CHAT_EVENTS = frozenset(
    {"first_token", "preempted", "resumed", "parked", "unparked", "thinned", "restored", "swapped_out", "swapped_in"}
)
"""The worker's events that stand on the `chat` span. The others are edges of its phases."""
MAX_PHASES = 32
"""The most spans of one worker's phases: a request that is preempted again and again has a readable trace, too."""
MAX_INT = 2**63


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
    root.events = [(name, marks.at[name], {}) for name in SERVER_EVENTS if name in marks.at]
    chat = _chat(record, marks)
    below = (_admit(record, marks), _dispatch(record, marks), chat, _settle(record, marks, chat))
    root.children = [span for span in below if span is not None]
    return root


def ship(record: RequestRecord, shipped_mono_ns: int) -> PlannedSpan:
    """Returns the span from the durable ending to the moment at which SQL had it, of a request that was settled."""
    marks = _Marks(record)
    settled = marks.at["settled"]
    shipped = record.started_ns + shipped_mono_ns - record.started_mono_ns
    return PlannedSpan(names.SHIP, "internal", settled, max(settled, shipped))


def failed(record: RequestRecord) -> bool:
    """Returns whether the request failed through our fault; a client's mistake is no failure."""
    return record.outcome == "server_error"


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
        names.OUTCOME: record.outcome,
        names.NUM_RETRIES: record.num_retries or None,
        names.REPLAYED: record.replayed,
    }
    if record.principal is not None:
        attributes[names.TENANT_ID] = record.principal.tenant_id
        attributes[names.API_KEY_ID] = record.principal.key_id
        attributes[names.BATCH_ID] = record.principal.batch_id
    if record.facts is not None:
        attributes[names.LINE_NO] = record.facts.line_no
    if record.error_code:
        attributes[names.ERROR_TYPE] = record.error_code
    return _given(attributes)


def _admit(record: RequestRecord, marks: _Marks) -> PlannedSpan | None:
    """Returns the span from the counted prompt to the admission, or to the refusal, which carries its code and the
    limit that decided.
    """
    start = marks.first("tokenized")
    if start is None:
        return None
    yes = marks.first("admitted")
    if yes is not None:
        return PlannedSpan(names.ADMIT, "internal", start, yes, _given({names.LEASE_BOUND: record.lease_bound or None}))
    refusal = {names.ERROR_TYPE: record.error_code, names.REFUSED_BY: record.refused_by}
    return PlannedSpan(names.ADMIT, "internal", start, marks.end, _given(refusal))


def _dispatch(record: RequestRecord, marks: _Marks) -> PlannedSpan | None:
    """Returns the span in which the worker is chosen, OPEN is written and the request is sent."""
    start = marks.first("admitted")
    if start is None:
        return None
    sent = marks.first("dispatched")
    span = PlannedSpan(names.DISPATCH, "internal", start, sent or marks.end)
    span.error = "" if sent else _error(record)
    span.attributes = _given({names.WORKER_ID: record.worker})
    if record.routed is not None and "routed" in marks.at:
        routed = {
            names.ROUTER_REASON: record.routed.reason,
            names.ROUTER_CACHED: record.routed.num_cached,
            names.ROUTER_ELSEWHERE: record.routed.num_elsewhere,
            names.ROUTER_TTFT_S: record.routed.ttft_s,
        }
        span.events = [("routed", marks.at["routed"], routed)]
    return span


def _chat(record: RequestRecord, marks: _Marks) -> PlannedSpan | None:
    start = marks.first("dispatched")
    operation = names.OPERATIONS.get(record.route)
    if start is None or operation is None or not record.is_answer:
        return None
    end = max(start, marks.first("finished", "settled") or marks.end)
    span = PlannedSpan(f"{operation} {record.model}", "client", start, end, _genai(record, marks, operation))
    span.error = _error(record)
    moves = [record.started_ns + offset for name, offset in record.marks if name == "moved"]
    sent = max([start, *moves])  # to the worker whose timeline came
    place = _Placed(sent, end)
    timeline = record.worker_timeline
    if "finished" in marks.at and timeline:
        lasted_us = max(event.offset_us for event in timeline)
        span.attributes[names.WIRE_S] = max(0.0, (end - sent) / 1e9 - lasted_us / 1e6)
    span.events = sorted(
        [
            *(
                (event.name, place(event.offset_us), _step(event.step))
                for event in timeline
                if event.name in CHAT_EVENTS
            ),
            *_leases(record),
            *(("moved", at_ns, {}) for at_ns in moves),
            *((name, marks.at[name], {names.NUM_TOKENS: record.num_received}) for name in CUTS if name in marks.at),
        ],
        key=lambda event: event[1],
    )
    span.children = _phases(record, place)
    return span


def _genai(record: RequestRecord, marks: _Marks, operation: str) -> dict[str, Any]:
    usage, counts = record.usage, record.worker_usage
    first = marks.first("first_byte")
    return _given(
        {
            names.OPERATION_NAME: operation,
            names.PROVIDER_NAME: names.PROVIDER,
            names.REQUEST_MODEL: record.model,
            names.REQUEST_STREAM: record.stream,
            **(_asked(record.asked) if record.asked else {}),
            names.RESPONSE_ID: record.request_id,
            names.RESPONSE_MODEL: record.model,
            names.FINISH_REASONS: record.finish_reasons or None,
            names.TIME_TO_FIRST_CHUNK: (first - record.started_ns) / 1e9
            if first and record.stream and not record.background
            else None,
            names.INPUT_TOKENS: usage.prompt,
            names.OUTPUT_TOKENS: usage.output,
            names.CACHE_READ_TOKENS: usage.cache_read,
            names.CACHE_WRITE_TOKENS: usage.cache_write,
            names.RECOMPUTED_TOKENS: (counts.recomputed or None) if counts else None,
            names.SPECULATED_TOKENS: (counts.speculated or None) if counts else None,
            names.WORKER_ID: record.worker or None,
            names.LEASE_RENEWALS: len(record.leases),
            names.PREEMPTIONS: sum(e.name == "preempted" for e in record.worker_timeline),
        }
    )


def _asked(asked: Asked) -> dict[str, Any]:
    return {
        names.MAX_TOKENS: asked.max_tokens,
        names.CHOICE_COUNT: asked.num_choices,
        names.TEMPERATURE: asked.temperature,
        names.TOP_P: asked.top_p,
        names.TOP_K: asked.top_k or None,
        names.SEED: asked.seed if asked.seed < MAX_INT else None,
        names.FREQUENCY_PENALTY: asked.frequency_penalty,
        names.PRESENCE_PENALTY: asked.presence_penalty,
        names.NUM_PROMPTS: asked.num_prompts if asked.num_prompts > 1 else None,
        names.HAS_GRAMMAR: asked.has_grammar or None,
    }


def _leases(record: RequestRecord) -> list[tuple[str, int, dict[str, Any]]]:
    """Returns an event for each extension of the lease."""
    return [
        (
            "lease",
            record.started_ns + lease.at_mono_ns - record.started_mono_ns,
            {names.LEASE_BOUND: lease.bound, names.LEASE_RESULT: lease.result},
        )
        for lease in record.leases
    ]


class _Placed:
    """Places the offset of a worker's event inside [start, end]."""

    def __init__(self, start: int, end: int) -> None:
        self._start, self._end = start, end

    def __call__(self, offset_us: int) -> int:
        return min(self._start + max(0, offset_us) * 1000, self._end)


def _phases(record: RequestRecord, place: _Placed) -> list[PlannedSpan]:
    """Returns the worker's phases. The chunks of one prefill are events of one span."""
    timeline = record.worker_timeline
    found = timelines.worker_phases([Event(e.name, e.offset_us, e.step, e.num_tokens) for e in timeline])
    groups = [(name, list(group)) for name, group in groupby(found, key=lambda phase: phase.name)]
    spans = [_phase(name, group, place) for name, group in groups[:MAX_PHASES]]
    matched = next((event for event in timeline if event.name == "matched"), None)
    prefill = next((span for span in spans if span.name == names.PREFILL), None)
    if matched is not None and prefill is not None:
        prefill.events.insert(0, ("cache_match", place(matched.offset_us), _cache(record, matched.num_tokens)))
    return spans


def _phase(name: str, group: Sequence[Phase], place: _Placed) -> PlannedSpan:
    span = PlannedSpan(name, "internal", place(group[0].start_us), place(group[-1].end_us))
    if name == names.QUEUE:
        span.attributes[names.QUEUE_WAIT_S] = (span.end_ns - span.start_ns) / 1e9
    if name == names.PREFILL:
        span.events = [
            ("chunk", place(one.end_us), _step(one.step) | {names.NUM_TOKENS: one.num_tokens})
            for one in group
            if one.num_tokens
        ]
    return span


def _cache(record: RequestRecord, num_matched: int) -> dict[str, Any]:
    """Returns what the prefix cache had of the prompt on the device, and why it had no more."""
    report = record.cache
    return _given(
        {
            names.CACHED_TOKENS: num_matched,
            names.PUBLIC_TOKENS: report.public_tokens,
            names.MISS_REASON: report.miss_reason,
            names.DIVERGED_AT: report.diverged_at_token if report.diverged_at_token >= 0 else None,
        }
    )


def _settle(record: RequestRecord, marks: _Marks, chat: PlannedSpan | None) -> PlannedSpan | None:
    end = marks.first("settled")
    if end is None:
        return None
    start = chat.end_ns if chat else end
    attributes = {names.CHARGE: record.charge_micro_units, names.CURRENCY: record.currency}
    return PlannedSpan(names.SETTLE, "internal", min(start, end), end, _given(attributes))


def _step(step: int) -> dict[str, Any]:
    return {names.STEP: step} if step >= 0 else {}


def _error(record: RequestRecord) -> str:
    return (record.error_code or str(record.status)) if failed(record) else ""


def _given(attributes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if value is not None and value != ""}
