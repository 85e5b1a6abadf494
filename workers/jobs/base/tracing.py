"""Spans of the jobs process, by Celery's signals: the task of each message, and each chunk as a separate trace.

The Celery header covers only the way from publish to receive, as a message may be lost. A chunk belongs to the trace
context in the batch's row, by a link; chunk and task link each other. Each line is a root span at the gateway, which
links to the chunk by the header of the request; the chunk links to each line by the header of the answer. No span holds
a line's text or an exception's message, in which it could stand.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from accounting.batches.batch_runs import BatchClaim
from accounting.batches.batches import QUEUE
from accounting.batches.claims import ChunkClaim

BATCH_ID, LINE_NO, TENANT_ID, WORK = (
    "headgate.batch.id",
    "headgate.batch.line_no",
    "headgate.tenant.id",
    "headgate.batch.work",
)
CHUNK_SEQ, CLAIM, NUM_TOKENS, LEFT = (
    "headgate.batch.chunk",
    "headgate.batch.chunk.claim",
    "headgate.batch.predicted_tokens",
    "headgate.batch.chunk.left",
)
HTTP_STATUS, ERROR_TYPE = "http.response.status_code", "error.type"
TRACE_RESPONSE = "traceresponse"
"""The header in which the gateway names the trace of an answer."""
MAX_LINKS = 1024
"""More than a chunk has lines. Beyond it the SDK drops the oldest links and says how many."""
_W3C = TraceContextTextMapPropagator()


def provider() -> TracerProvider:
    """Makes the provider: one per process, made after the fork; `shutdown()` is called before the process ends. The
    SDK's own ratio sampler (OTEL_TRACES_SAMPLER) decides; without an endpoint nothing is exported."""
    made = TracerProvider(
        shutdown_on_exit=False,
        span_limits=SpanLimits(max_links=MAX_LINKS),
        resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or "headgate-jobs"}),
    )
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if any(os.environ.get(name) for name in names) and os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp":
        # It loads protobuf, about 10 MB, which few processes need.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


def inject(headers: MutableMapping[str, Any], span: Span) -> None:
    """Writes the trace context into a message's headers, at publish."""
    _W3C.inject(headers, set_span_in_context(span, Context()))


def extract(headers: Mapping[str, Any]) -> Context:
    """Reads the trace context from a message's headers, at receive. Other headers are ignored."""
    value = headers.get("traceparent")
    return _W3C.extract({"traceparent": value}, Context()) if isinstance(value, str) else Context()


def parse(value: str) -> SpanContext | None:
    context = get_current_span(extract({"traceparent": value})).get_span_context()
    return context if context.is_valid else None


class ChunkTrace:
    """The trace of a chunk, as those see it who send its lines."""

    def __init__(self, span: Span) -> None:
        self._span = span
        headers: dict[str, str] = {}
        inject(headers, span)
        self.headers: Mapping[str, str] = headers
        """The headers of every line's request: the line links to the chunk."""

    def answered(self, line_no: int, status: int, headers: Mapping[str, str]) -> None:
        """Links to the request that a line became, by the headers of its answer."""
        line = parse(headers.get(TRACE_RESPONSE, "")) if self._span.is_recording() else None
        if line is not None:
            self._span.add_link(line, {LINE_NO: line_no, HTTP_STATUS: status})

    def left(self, how: str) -> None:
        self._span.set_attribute(LEFT, how)


@contextmanager
def look_span(tracer: Tracer, message_id: str, headers: Mapping[str, Any]) -> Iterator[Span]:
    """Makes the span of one Celery task. Whoever sent the message is its parent."""
    attributes = {
        "messaging.system": "celery",
        "messaging.operation.name": "process",
        "messaging.destination.name": QUEUE,
        "messaging.message.id": message_id,
    }
    with _span(tracer, "look", extract(headers), SpanKind.CONSUMER, attributes) as span:
        yield span


@contextmanager
def batch_span(tracer: Tracer, held: BatchClaim, batch_traceparent: str) -> Iterator[Span]:
    """Makes the span of a batch's validation or end, below the task that does it, with a link to the batch's
    creation."""
    name = "batch validate" if held.work == "validate" else "batch finalise"
    attributes = {BATCH_ID: held.batch_id, TENANT_ID: held.tenant_id, WORK: held.work}
    with _span(tracer, name, None, SpanKind.INTERNAL, attributes, _links(batch_traceparent)) as span:
        yield span


@contextmanager
def chunk_span(tracer: Tracer, held: ChunkClaim, batch_traceparent: str) -> Iterator[ChunkTrace]:
    """Starts a new trace with links to the batch and to the present task: one trace of 500 chunks could not be read.
    The task gets a link to the chunk."""
    task = get_current_span()
    links = _links(batch_traceparent)
    if task.get_span_context().is_valid:
        links.append(Link(task.get_span_context()))
    attributes = {
        BATCH_ID: held.batch_id,
        CHUNK_SEQ: held.seq,
        CLAIM: held.fence,
        NUM_TOKENS: held.predicted_tokens,
        TENANT_ID: held.tenant_id,
    }
    with _span(tracer, "batch chunk", Context(), SpanKind.INTERNAL, attributes, links) as span:
        task.add_link(span.get_span_context())
        yield ChunkTrace(span)


@contextmanager
def _span(
    tracer: Tracer,
    name: str,
    above: Context | None,
    kind: SpanKind,
    attributes: Mapping[str, Any],
    links: Sequence[Link] = (),
) -> Iterator[Span]:
    """Makes a current span. Of an exception it keeps the type alone: SQL's messages have values of rows in them."""
    quiet = {"record_exception": False, "set_status_on_exception": False}
    with tracer.start_as_current_span(name, above, kind, attributes, links, **quiet) as span:
        try:
            yield span
        except BaseException as error:
            span.set_attribute(ERROR_TYPE, type(error).__name__)
            span.set_status(Status(StatusCode.ERROR))
            raise


def _links(batch_traceparent: str) -> list[Link]:
    batch = parse(batch_traceparent)
    return [Link(batch)] if batch else []
