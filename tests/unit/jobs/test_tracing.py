"""Spans of the jobs process: chunk, task and lines link to each other, and no exception's text is kept."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import Tracer

from accounting.batches.batch_runs import BatchClaim
from accounting.batches.claims import ChunkClaim
from workers.jobs.base import tracing

BATCH = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
LINE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"
CHUNK = ChunkClaim("batch_1", 3, "proj_1", "owner", 2, 700, b"")


class Kept(SpanProcessor):
    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)

    def named(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def tracer(kept: Kept) -> Tracer:
    provider = tracing.provider()
    provider.add_span_processor(kept)
    return provider.get_tracer("test")


def test_a_chunk_and_its_task_and_its_lines_link_to_each_other(kept: Kept, tracer: Tracer) -> None:
    with tracing.look_span(tracer, "message-1", {"traceparent": BATCH}), tracing.chunk_span(tracer, CHUNK, BATCH) as it:
        for line_no, status in ((7, 503), (7, 200)):
            it.answered(line_no, status, {"traceresponse": LINE})
        it.answered(8, 200, {})
        it.answered(9, 200, {"traceresponse": "canary"})
    look, chunk = kept.named("look"), kept.named("batch chunk")
    assert chunk.parent is None
    assert [f"{link.context.span_id:016x}" for link in chunk.links] == [
        "b7ad6b7169203331",
        f"{look.context.span_id:016x}",
        *["00f067aa0ba902b7"] * 2,
    ]
    assert [link.attributes for link in chunk.links[2:]] == [
        {"headgate.batch.line_no": 7, "http.response.status_code": status} for status in (503, 200)
    ]
    assert [link.context.span_id for link in look.links] == [chunk.context.span_id]
    assert it.headers["traceparent"].split("-")[1:3] == [
        f"{chunk.context.trace_id:032x}",
        f"{chunk.context.span_id:016x}",
    ]
    assert chunk.attributes is not None
    assert chunk.attributes["headgate.batch.chunk.claim"] == 2, "it is the second run"


def test_a_chunk_has_a_link_to_every_line(kept: Kept, tracer: Tracer) -> None:
    with tracing.chunk_span(tracer, CHUNK, "") as it:
        for line_no in range(512):
            it.answered(line_no, 200, {"traceresponse": LINE})
    assert len(kept.named("batch chunk").links) == 512


@pytest.mark.parametrize("work", ["validate", "complete"])
def test_an_exception_leaves_its_type_and_nothing_of_its_text(kept: Kept, tracer: Tracer, work: str) -> None:
    held = BatchClaim("batch_1", "proj_1", 1, work)
    with (
        pytest.raises(ValueError, match="canary"),
        tracing.look_span(tracer, "message-1", {}),
        tracing.batch_span(tracer, held, BATCH),
    ):
        raise ValueError("INSERT ... [parameters: ('canary',)]")
    for span in kept.spans:
        assert span.attributes is not None
        assert span.attributes["error.type"] == "ValueError"
        assert not span.status.is_ok
        assert "canary" not in span.to_json()


def test_an_unsampled_chunk_costs_no_link_and_breaks_nothing() -> None:
    tracer = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("test")
    with tracing.look_span(tracer, "message-1", {}), tracing.chunk_span(tracer, CHUNK, BATCH) as it:
        it.answered(1, 200, {"traceresponse": LINE})
        it.left("done")
    assert int(it.headers["traceparent"][-2:], 16) & 1 == 0


def test_a_chunk_without_a_task_has_no_link_to_one(kept: Kept, tracer: Tracer) -> None:
    with tracing.chunk_span(tracer, CHUNK, ""):
        pass
    assert not kept.named("batch chunk").links
