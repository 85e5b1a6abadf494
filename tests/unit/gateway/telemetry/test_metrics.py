"""Metric pages: bounded series, both formats, several processes on one page."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.telemetry.exposition import OPENMETRICS, TEXT, gathered
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.record import RequestRecord

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
