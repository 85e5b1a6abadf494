"""A logged request as OTLP/JSON: the spans that tracing exports of a sampled request, made from its row in the log.

Ids of spans are derived from the request's id, so that the same request always gives the same spans. The module is
pure.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from accounting.requests.request_log import LoggedRequest
from accounting.values import timelines
from accounting.values.timelines import Event
from accounting.values.types import Principal, Usage
from gateway.telemetry import names, spans
from gateway.telemetry.record import RequestRecord
from gateway.telemetry.spans import PlannedSpan
from workers.protocol.messages import TimelineEvent

_KINDS = {"internal": 1, "server": 2, "client": 3}
_ERROR = 2
_TRACE_ID = re.compile(r"[0-9a-f]{32}")


def document(one: LoggedRequest, *, for_operator: bool) -> dict[str, Any]:
    """Returns the resource spans of one request. Only the operator sees workers."""
    made = list(_spans(spans.plan(_record(one, for_operator)), trace_id(one), one.request_id, ""))
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes({"service.name": "headgate-gateway"})},
                "scopeSpans": [{"scope": {"name": "headgate"}, "spans": made}],
            }
        ]
    }


def traceparent(one: LoggedRequest) -> str:
    """Returns the W3C trace context of the request's first span in `document`."""
    return f"00-{trace_id(one)}-{_span_id(one.request_id, '0')}-01"


def trace_id(one: LoggedRequest) -> str:
    """Returns the request's trace id, or one that is derived from its own id if it had none."""
    return (
        one.trace_id if _TRACE_ID.fullmatch(one.trace_id) else hashlib.sha256(one.request_id.encode()).hexdigest()[:32]
    )


def _record(one: LoggedRequest, for_operator: bool) -> RequestRecord:
    timeline = timelines.unpack(one.timeline)
    method, _, route = one.endpoint.partition(" ")
    record = RequestRecord(
        one.request_id, method, started_ns=one.started_at_ms * 1_000_000, route=route, status=one.status
    )
    record.error_code = one.error_code
    record.disconnect_phase = "decode" if one.outcome == "client_gone" else ""
    record.principal = Principal("tenant", one.tenant_id, one.key_id, frozenset(), batch_id=one.batch_id)
    record.model, record.tier, record.stream = one.model, one.tier, one.is_stream
    uncached = one.prompt_tokens - one.cached_tokens - one.cache_write_tokens
    record.usage = Usage(one.cached_tokens, one.cache_write_tokens, uncached, one.output_tokens)
    record.charge_micro_units = one.charge
    record.finish_reasons = tuple(filter(None, one.finish_reason.split(",")))
    record.worker = one.worker if for_operator else ""
    record.marks = [(_mark(event), event.at_us * 1000) for event in timeline.gateway]
    sent_us = next((event.at_us for event in timeline.gateway if event.name == "dispatched"), 0)
    record.worker_timeline = tuple(
        TimelineEvent(event.name, event.at_us - sent_us, event.step, event.num_tokens) for event in timeline.worker
    )
    return record


def _mark(event: Event) -> Any:
    return event.name


def _spans(
    planned: PlannedSpan, trace: str, request_id: str, parent: str, place: str = "0"
) -> Iterator[dict[str, Any]]:
    """Yields a span and everything below it. `place` is its place in the tree."""
    attributes = planned.attributes | ({names.ERROR_TYPE: planned.error} if planned.error else {})
    span_id = _span_id(request_id, place)
    yield {
        "traceId": trace,
        "spanId": span_id,
        "parentSpanId": parent,
        "name": planned.name,
        "kind": _KINDS[planned.kind],
        "startTimeUnixNano": str(planned.start_ns),
        "endTimeUnixNano": str(planned.end_ns),
        "attributes": _attributes(attributes),
        "events": [
            {"timeUnixNano": str(at_ns), "name": name, "attributes": _attributes(given)}
            for name, at_ns, given in planned.events
        ],
        "status": {"code": _ERROR} if planned.error else {},
    }
    for number, child in enumerate(planned.children):
        yield from _spans(child, trace, request_id, span_id, f"{place}.{number}")


def _span_id(request_id: str, place: str) -> str:
    return hashlib.sha256(f"{request_id} {place}".encode()).hexdigest()[:16]


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in values.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}  # JSON numbers have no room for 64 bits
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, tuple | list):
        return {"arrayValue": {"values": [_value(one) for one in value]}}
    return {"stringValue": str(value)}
