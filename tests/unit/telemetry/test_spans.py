"""The tree of spans that one record becomes."""

from __future__ import annotations

import pytest

from accounting.values.types import Principal, Usage
from gateway.telemetry import names, spans
from gateway.telemetry.record import RequestRecord
from workers.protocol.messages import TimelineEvent

MS = 1_000_000


def record(*marks: tuple[str, int], status: int = 200, **fields) -> RequestRecord:
    """Marks in milliseconds after the acceptance."""
    made = RequestRecord("req_1", "POST", started_ns=10**18, route="/v1/chat/completions", **fields)
    made.status = status
    made.model = "llama"
    made.marks = [(name, ms * MS) for name, ms in marks]
    return made


def whole(**fields) -> RequestRecord:
    marks = [
        ("accepted", 0),
        ("authenticated", 1),
        ("tokenized", 3),
        ("admitted", 5),
        ("dispatched", 6),
        ("first_byte", 40),
        ("finished", 110),
        ("settled", 112),
        ("last_byte", 113),
    ]
    timeline = (
        TimelineEvent("queued", 0),
        TimelineEvent("matched", 4_000, 7),
        TimelineEvent("chunk", 20_000, 8, 256),
        TimelineEvent("first_token", 30_000, 9),
        TimelineEvent("preempted", 50_000, 11),
        TimelineEvent("resumed", 60_000, 13),
        TimelineEvent("finished", 100_000, 40),
    )
    return record(*marks, worker_timeline=timeline, **fields)


def flat(span):
    yield span
    for child in span.children:
        yield from flat(child)


def test_a_request_becomes_seven_nested_spans_in_order():
    root = spans.plan(whole())
    assert [s.name for s in flat(root)] == [
        "POST /v1/chat/completions",
        "admit",
        "chat llama",
        "queue",
        "prefill",
        "decode",
        "settle",
    ]
    for parent in flat(root):
        assert all(parent.start_ns <= c.start_ns <= c.end_ns <= parent.end_ns for c in parent.children)


def test_phases_come_from_the_workers_offsets_inside_the_chat_span():
    chat = next(s for s in flat(spans.plan(whole())) if s.kind == "client")
    base = 10**18 + 6 * MS
    assert (chat.start_ns, chat.end_ns) == (base, 10**18 + 110 * MS)
    edges = [(s.name, (s.start_ns - base) // MS, (s.end_ns - base) // MS) for s in chat.children]
    assert edges == [("queue", 0, 4), ("prefill", 4, 30), ("decode", 30, 100)]
    assert [e[0] for e in chat.events] == ["first_token", "preempted", "resumed"]
    assert chat.children[0].attributes[names.QUEUE_WAIT_S] == pytest.approx(0.004)


def test_a_workers_clock_that_runs_ahead_stays_inside():
    made = whole()
    made.worker_timeline = (TimelineEvent("queued", 0), TimelineEvent("finished", 900_000))
    chat = next(s for s in flat(spans.plan(made)) if s.kind == "client")
    assert all(s.end_ns <= chat.end_ns for s in chat.children)


def test_without_a_finished_mark_the_timeline_ends_the_chat_span():
    made = whole()
    made.marks = [mark for mark in made.marks if mark[0] != "finished"]
    by_name = {s.name: s for s in flat(spans.plan(made))}
    assert by_name["chat llama"].end_ns == 10**18 + 106 * MS
    assert by_name["settle"].start_ns == by_name["chat llama"].end_ns


def test_usage_and_parameters_are_numbers_and_nothing_else():
    made = whole(
        usage=Usage(cache_read=48, cache_write=16, uncached=3, output=9),
        params={"temperature": 0.5, "stop_sequences": ["canary"], "prompt": "canary"},
    )
    chat = next(s for s in flat(spans.plan(made)) if s.kind == "client")
    assert chat.attributes[names.INPUT_TOKENS] == 67
    assert chat.attributes[names.CACHE_READ_TOKENS] == 48
    assert chat.attributes["gen_ai.request.temperature"] == 0.5
    assert "canary" not in str(list(flat(spans.plan(made))))


def test_a_refused_request_has_an_admit_span_that_says_why():
    made = record(
        ("accepted", 0),
        ("authenticated", 1),
        ("tokenized", 2),
        ("last_byte", 4),
        status=429,
        error_code="rate_limit_exceeded",
    )
    root = spans.plan(made)
    (admit,) = root.children
    assert admit.name == "admit"
    assert admit.attributes[names.ERROR_TYPE] == "rate_limit_exceeded"
    assert root.error == "", "a refusal is the client's, not ours"


def test_our_failure_marks_server_and_chat_span():
    made = record(
        ("accepted", 0),
        ("tokenized", 1),
        ("admitted", 2),
        ("dispatched", 3),
        ("last_byte", 9),
        status=200,
        outcome="server_error",
        error_code="upstream_lost",
    )
    root = spans.plan(made)
    assert spans.failed(made)
    assert root.error == "upstream_lost"
    assert [s.error for s in root.children] == ["", "upstream_lost"]


def test_a_cut_timeline_leaves_no_phase_without_an_end():
    made = whole()
    made.worker_timeline = (TimelineEvent("queued", 0), TimelineEvent("finished", 9_000))
    phases = [s for s in flat(spans.plan(made)) if s.name in ("queue", "prefill", "decode")]
    assert [(s.name, (s.end_ns - s.start_ns) // MS) for s in phases] == [("queue", 9)]


def test_the_callers_identity_is_ids_only():
    principal = Principal(kind="batch", tenant_id="proj_1", key_id="key_1", scopes=frozenset(), batch_id="batch_1")
    attributes = spans.plan(whole(principal=principal)).attributes
    assert attributes[names.TENANT_ID] == "proj_1"
    assert attributes[names.API_KEY_ID] == "key_1"
    assert attributes[names.BATCH_ID] == "batch_1"
