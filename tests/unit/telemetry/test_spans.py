"""The tree of spans that one record becomes."""

from __future__ import annotations

import pytest

from accounting.values.types import Principal, Usage
from gateway.routing.placement import Placement
from gateway.telemetry import names, spans
from gateway.telemetry.record import Asked, LeaseMark, RequestRecord
from workers.protocol.messages import CacheReport, TimelineEvent

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
        ("admitted", 4),
        ("routed", 5),
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


def chat_of(root):
    return next(span for span in flat(root) if span.kind == "client")


def offsets(span, base):
    return [(name, (at - base) // MS) for name, at, _ in span.events]


def test_a_request_becomes_nested_spans_in_order():
    root = spans.plan(whole())
    assert [s.name for s in flat(root)] == [
        "POST /v1/chat/completions",
        "admit",
        "dispatch",
        "chat llama",
        "queue",
        "prefill",
        "decode",
        "preempted",
        "decode",
        "settle",
    ]
    for parent in flat(root):
        assert all(parent.start_ns <= c.start_ns <= c.end_ns <= parent.end_ns for c in parent.children)
        assert all(parent.start_ns <= at <= parent.end_ns for _, at, _ in parent.events)


@pytest.mark.parametrize(
    ("route", "name"),
    [
        ("/v1/responses", "chat llama"),
        ("/v1/messages", "chat llama"),
        ("/v1/completions", "text_completion llama"),
        ("/v1/embeddings", "embeddings llama"),
    ],
)
def test_every_route_that_answers_has_a_span_of_the_model(route, name):
    made = whole(stream=True)
    made.route = route
    span = chat_of(spans.plan(made))
    assert span.name == name
    assert span.attributes[names.OPERATION_NAME] == name.split()[0]
    assert span.attributes[names.TIME_TO_FIRST_CHUNK] == 0.04


def test_a_run_in_the_background_has_a_span_of_the_model_and_no_time_to_its_first_chunk():
    made = whole(stream=True, background="run")
    made.route = "/v1/responses"
    span = chat_of(spans.plan(made))
    assert span.name == "chat llama"
    assert names.TIME_TO_FIRST_CHUNK not in span.attributes


def test_decode_windows_end_where_blocks_are_lost_or_a_lease_is_spent():
    made = whole()
    made.worker_timeline = (
        TimelineEvent("queued", 0),
        TimelineEvent("compiling", 0),
        TimelineEvent("compiled", 2_000),
        TimelineEvent("matched", 4_000, 7, 48),
        TimelineEvent("restored", 6_000, 8, 64),
        TimelineEvent("chunk", 20_000, 8, 256),
        TimelineEvent("chunk", 30_000, 9, 100),
        TimelineEvent("first_token", 30_000, 9),
        TimelineEvent("parked", 40_000, 10),
        TimelineEvent("unparked", 45_000),
        TimelineEvent("preempted", 50_000, 11),
        TimelineEvent("swapped_out", 51_000, -1, 400),
        TimelineEvent("resumed", 60_000, 13),
        TimelineEvent("swapped_in", 65_000, 14, 400),
        TimelineEvent("chunk", 70_000, 15, 7),
        TimelineEvent("finished", 100_000, 40),
    )
    chat = chat_of(spans.plan(made))
    base = chat.start_ns
    assert [(s.name, (s.start_ns - base) // MS, (s.end_ns - base) // MS) for s in chat.children] == [
        ("queue", 0, 0),
        ("grammar", 0, 2),
        ("queue", 2, 4),
        ("restore", 4, 6),
        ("prefill", 6, 30),
        ("decode", 30, 40),
        ("parked", 40, 45),
        ("decode", 45, 50),
        ("preempted", 50, 60),
        ("swap_in", 60, 65),
        ("prefill", 65, 70),
        ("decode", 70, 100),
    ]
    prefills = [s for s in chat.children if s.name == "prefill"]
    assert offsets(prefills[0], base) == [("cache_match", 4), ("chunk", 20), ("chunk", 30)]
    assert offsets(prefills[1], base) == [("chunk", 70)]
    assert [e[0] for e in chat.events] == [
        "restored",
        "first_token",
        "parked",
        "unparked",
        "preempted",
        "swapped_out",
        "resumed",
        "swapped_in",
    ]


def test_a_request_that_is_preempted_again_and_again_has_a_bounded_tree():
    made = whole()
    turns = [TimelineEvent(("preempted", "resumed")[n % 2], 1000 + n * 100, n) for n in range(240)]
    made.worker_timeline = (*made.worker_timeline[:4], *turns, TimelineEvent("finished", 90_000))
    chat = chat_of(spans.plan(made))
    assert len(chat.children) == spans.MAX_PHASES
    assert chat.attributes[names.PREEMPTIONS] == 120


def test_the_routers_choice_the_lease_and_the_cache_say_why():
    made = whole(
        worker="worker-3",
        routed=Placement("worker-3", "affinity", 128, 64, 0.25),
        cache=CacheReport(128, 32, "diverged", 130),
        lease_bound=16,
    )
    made.leases = [LeaseMark(made.started_mono_ns + 45 * MS, 128, "granted")]
    root = spans.plan(made)
    by_name = {s.name: s for s in flat(root)}
    assert by_name["admit"].attributes == {names.LEASE_BOUND: 16}
    dispatch = by_name["dispatch"]
    assert dispatch.attributes == {names.WORKER_ID: "worker-3"}
    assert dispatch.events == [
        (
            "routed",
            10**18 + 5 * MS,
            {
                names.ROUTER_REASON: "affinity",
                names.ROUTER_CACHED: 128,
                names.ROUTER_ELSEWHERE: 64,
                names.ROUTER_TTFT_S: 0.25,
            },
        )
    ]
    (match,) = [e for e in by_name["prefill"].events if e[0] == "cache_match"]
    assert match[2] == {
        names.CACHED_TOKENS: 0,
        names.PUBLIC_TOKENS: 32,
        names.MISS_REASON: "diverged",
        names.DIVERGED_AT: 130,
    }
    (lease,) = [e for e in chat_of(root).events if e[0] == "lease"]
    assert lease[1:] == (10**18 + 45 * MS, {names.LEASE_BOUND: 128, names.LEASE_RESULT: "granted"})


def test_the_way_there_and_back_is_the_difference_of_two_durations():
    chat = chat_of(spans.plan(whole()))
    assert chat.attributes[names.WIRE_S] == pytest.approx(0.004), "104 ms at the gateway, 100 ms at the worker"


def test_a_lost_worker_is_told_by_what_the_gateway_saw():
    made = record(
        ("accepted", 0),
        ("tokenized", 1),
        ("admitted", 2),
        ("routed", 2),
        ("dispatched", 3),
        ("first_byte", 5),
        ("worker_lost", 8),
        ("finished", 8),
        ("settled", 9),
        ("last_byte", 10),
        error_code="upstream_lost",
        num_received=3,
        worker="worker-1",
    )
    root = spans.plan(made)
    chat = chat_of(root)
    assert (root.error, chat.error) == ("upstream_lost", "upstream_lost")
    assert chat.end_ns == 10**18 + 8 * MS
    assert chat.events == [("worker_lost", chat.end_ns, {names.NUM_TOKENS: 3})]
    assert chat.attributes[names.WORKER_ID] == "worker-1"
    assert not chat.children, "the worker took its timeline with it"


def test_a_worker_that_was_gone_before_the_request_left_fails_the_dispatch():
    made = record(
        ("accepted", 0), ("tokenized", 1), ("admitted", 2), ("routed", 3), ("last_byte", 5), status=503, error_code="x"
    )
    dispatch = spans.plan(made).children[-1]
    assert (dispatch.name, dispatch.error, dispatch.end_ns) == ("dispatch", "x", 10**18 + 5 * MS)


def test_shipping_goes_from_the_durable_ending_to_sql():
    made = whole()
    shipped = spans.ship(made, made.started_mono_ns + 300 * MS)
    assert (shipped.name, shipped.start_ns, shipped.end_ns) == ("ship", 10**18 + 112 * MS, 10**18 + 300 * MS)


def test_phases_come_from_the_workers_offsets_inside_the_chat_span():
    chat = next(s for s in flat(spans.plan(whole())) if s.kind == "client")
    base = 10**18 + 6 * MS
    assert (chat.start_ns, chat.end_ns) == (base, 10**18 + 110 * MS)
    edges = [(s.name, (s.start_ns - base) // MS, (s.end_ns - base) // MS) for s in chat.children]
    assert edges == [
        ("queue", 0, 4),
        ("prefill", 4, 30),
        ("decode", 30, 50),
        ("preempted", 50, 60),
        ("decode", 60, 100),
    ]
    assert [e[0] for e in chat.events] == ["first_token", "preempted", "resumed"]
    assert chat.children[0].attributes[names.QUEUE_WAIT_S] == pytest.approx(0.004)


def test_a_workers_clock_that_runs_ahead_stays_inside():
    made = whole()
    made.worker_timeline = (TimelineEvent("queued", 0), TimelineEvent("finished", 900_000))
    chat = next(s for s in flat(spans.plan(made)) if s.kind == "client")
    assert all(s.end_ns <= chat.end_ns for s in chat.children)


def test_usage_and_parameters_are_numbers_and_nothing_else():
    made = whole(
        usage=Usage(cache_read=48, cache_write=16, uncached=3, output=9),
        asked=Asked(1, 2, 64, 0.5, 1.0, 0, 2**64 - 1, 0.0, 0.0, True),
        traceparent="canary",
        client_request_id="canary",
    )
    chat = next(s for s in flat(spans.plan(made)) if s.kind == "client")
    assert chat.attributes[names.INPUT_TOKENS] == 67
    assert chat.attributes[names.CACHE_READ_TOKENS] == 48
    assert chat.attributes["gen_ai.request.temperature"] == 0.5
    assert chat.attributes["gen_ai.request.choice.count"] == 2
    assert names.SEED not in chat.attributes, "OTLP has no unsigned integers"
    assert "canary" not in str(list(flat(spans.plan(made))))


def test_a_refused_request_has_an_admit_span_that_says_why():
    made = record(
        ("accepted", 0),
        ("authenticated", 1),
        ("tokenized", 2),
        ("last_byte", 4),
        status=429,
        error_code="rate_limit_exceeded",
        refused_by="key/requests_per_minute",
    )
    root = spans.plan(made)
    (admit,) = root.children
    assert admit.name == "admit"
    assert admit.attributes[names.ERROR_TYPE] == "rate_limit_exceeded"
    assert admit.attributes[names.REFUSED_BY] == "key/requests_per_minute"
    assert root.error == "", "a refusal is the client's, not ours"


def test_our_failure_marks_server_and_chat_span():
    made = record(
        ("accepted", 0),
        ("tokenized", 1),
        ("admitted", 2),
        ("dispatched", 3),
        ("last_byte", 9),
        status=200,
        error_code="upstream_lost",
    )
    root = spans.plan(made)
    assert spans.failed(made)
    assert root.error == "upstream_lost"
    assert [s.error for s in root.children] == ["", "", "upstream_lost"]


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
