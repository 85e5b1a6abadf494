"""Spans of the jobs process, by Celery's signals: from sending a message to the task, and each chunk as a trace of its
own.

The Celery header covers only the way from publish to receive, as a message may be lost. A chunk belongs to the trace
context in the batch's row, by a link. Each line is a root span at the gateway, which links to the chunk by the header
of the request.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from accounting.batches.claims import ChunkClaim

BATCH_ID, CHUNK_SEQ, NUM_TOKENS, TENANT_ID, LEFT = (
    "headgate.batch.id",
    "headgate.batch.chunk",
    "headgate.batch.predicted_tokens",
    "headgate.tenant.id",
    "headgate.batch.chunk.left",
)
_W3C = TraceContextTextMapPropagator()


def provider() -> TracerProvider:
    """Make the provider: one per process, made after the fork; `shutdown()` is called before the process ends. The
    SDK's own ratio sampler (OTEL_TRACES_SAMPLER) decides; without an endpoint nothing is exported."""
    made = TracerProvider(
        shutdown_on_exit=False,
        resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or "headgate-jobs"}),
    )
    names = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    if any(os.environ.get(name) for name in names) and os.environ.get("OTEL_TRACES_EXPORTER", "otlp") == "otlp":
        made.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return made


def inject(headers: MutableMapping[str, Any], span: Span) -> None:
    """Write the trace context into a message's headers, at publish."""
    _W3C.inject(headers, set_span_in_context(span, Context()))


def extract(headers: Mapping[str, Any]) -> Context:
    """Read the trace context from a message's headers, at receive. Other headers are ignored."""
    value = headers.get("traceparent")
    return _W3C.extract({"traceparent": value}, Context()) if isinstance(value, str) else Context()


def traceparent(span: Span) -> str:
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span, Context()))
    return carrier.get("traceparent", "")


def parse(value: str) -> SpanContext | None:
    context = get_current_span(extract({"traceparent": value})).get_span_context()
    return context if context.is_valid else None


@contextmanager
def chunk_span(tracer: Tracer, held: ChunkClaim, batch_traceparent: str) -> Iterator[Span]:
    """Start a new trace with a link to the batch: one trace of 500 chunks could not be read."""
    batch = parse(batch_traceparent)
    with tracer.start_as_current_span(
        "batch chunk",
        Context(),
        SpanKind.INTERNAL,
        {BATCH_ID: held.batch_id, CHUNK_SEQ: held.seq, NUM_TOKENS: held.predicted_tokens, TENANT_ID: held.tenant_id},
        [Link(batch)] if batch else [],
    ) as span:
        yield span
