"""Metric pages: bounded series, both formats, several processes on one page."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from accounting.values.types import Usage
from gateway.telemetry.exposition import gathered
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.record import RequestRecord
from workers.process.metrics_text import OPENMETRICS, TEXT

ACCEPTS = {
    "prometheus 2.42": (
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        OPENMETRICS,
    ),
    "prometheus 3": (
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;q=0.3",
        OPENMETRICS,
    ),
    "text": ("text/plain", TEXT),
    "none": ("", TEXT),
}


def record(**facts: object) -> RequestRecord:
    made = RequestRecord("req_1", "POST", route="/v1/chat/completions", status=200)
    for name, value in facts.items():
        setattr(made, name, value)
    made.mark("last_byte")
    return made


@pytest.mark.parametrize("scraper", ACCEPTS)
def test_each_scraper_gets_a_format_it_reads(scraper: str) -> None:
    accept, content_type = ACCEPTS[scraper]
    metrics = Metrics(3)
    metrics.observe(record())
    page = metrics.page(accept)
    assert page.content_type == content_type
    assert b'gateway="3"' in page.body
    assert page.body.endswith(b"# EOF\n") == (content_type == OPENMETRICS)


def test_names_need_no_escaping_and_no_series_is_created_by_time() -> None:
    metrics = Metrics(0)
    metrics.observe(record())
    for family in metrics.registry.collect():
        for sample in family.samples:
            assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", sample.name)
            assert not sample.name.endswith("_created")


def test_attack_F07_clients_cannot_create_series() -> None:
    metrics = Metrics(0)
    metrics.serve_models(["served"])
    metrics.observe(record(model="served"))
    before = len(metrics.page("").body.splitlines())
    for i in range(2000):
        metrics.observe(record(model=f"random-{i}"))
    assert len(metrics.page("").body.splitlines()) <= before * 2
    assert b"random-" not in metrics.page("").body


def test_pages_of_several_processes_become_one() -> None:
    first, second = Metrics(0), Metrics(1)
    first.observe(record())
    second.observe(record())
    pages = [("0", first.page(OPENMETRICS).body.decode()), ("1", second.page(OPENMETRICS).body.decode()), ("2", None)]
    body = gathered(pages, "").body.decode()
    families = {family.name: family for family in text_string_to_metric_families(body)}
    assert {s.labels["gateway"]: s.value for s in families["headgate_gateway_up"].samples} == {"0": 1, "1": 1, "2": 0}
    assert {s.labels["gateway"] for s in families["headgate_requests"].samples} == {"0", "1"}
    assert body.count("# TYPE headgate_requests_total ") == 1


def counted(metrics: Metrics) -> dict[str, float]:
    """The counts of requests by route, and of the three histograms and admissions, without zeros."""
    values: dict[str, float] = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.value and sample.name == "headgate_requests_total":
                values[sample.labels["route"]] = sample.value
            elif sample.value and sample.name.endswith(("_admission_total", "seconds_count")):
                name = sample.name.removeprefix("gen_ai_server_").removeprefix("headgate_")
                values[name] = values.get(name, 0) + sample.value
    return values


TIMES = {"request_duration_seconds_count", "time_to_first_token_seconds_count", "time_per_output_token_seconds_count"}


def streamed(**facts: object) -> RequestRecord:
    made = RequestRecord("req_1", "POST", status=200, stream=True, usage=Usage(0, 0, 3, 9))
    for name, value in facts.items():
        setattr(made, name, value)
    for mark in ("tokenized", "admitted", "first_byte", "last_byte"):
        made.mark(mark)
    return made


@pytest.mark.parametrize(
    "route", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]
)
def test_every_route_that_answers_is_measured(route: str) -> None:
    metrics = Metrics(0)
    metrics.observe(streamed(route=route))
    found = counted(metrics)
    assert found == {route: 1, "admission_total": 1, "admission_wait_seconds_count": 1, **dict.fromkeys(TIMES, 1)}


@pytest.mark.parametrize(
    ("facts", "label"),
    [
        ({"route": "/v1/responses", "background": "created"}, "/v1/responses"),
        ({"route": "/v1/responses", "background": "run"}, "/v1/responses/{response_id}/run"),
        ({"route": "/v1/responses", "method": "GET", "status": 101}, "GET /v1/responses"),
        ({"route": "/v1/messages/batches"}, "/v1/messages/batches"),
        ({"route": "/v1/batches"}, "/v1/batches"),
    ],
)
def test_what_no_client_waits_for_has_no_time_to_its_first_token(facts: dict[str, object], label: str) -> None:
    metrics = Metrics(0)
    metrics.observe(streamed(**facts))
    found = counted(metrics)
    assert found[label] == 1
    assert not TIMES & set(found)
    assert ("admission_total" in found) == ("background" in facts), "a batch's lines are counted one by one"


@pytest.mark.parametrize(
    ("facts", "outcome"),
    [
        ({}, "ok"),
        ({"status": 404}, "client_error"),
        ({"status": 429}, "refused"),
        ({"status": 503}, "server_error"),
        ({"error_code": "upstream_lost"}, "server_error"),
        ({"status": 499}, "client_gone"),
        ({"disconnect_phase": "decode"}, "client_gone"),
    ],
)
def test_outcomes_are_few(facts: dict[str, object], outcome: str) -> None:
    assert record(**facts).outcome == outcome
