"""Clients cannot make series: 100,000 different names of models, paths, agents and tenants."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from accounting.values.types import Charge, Posting, Usage
from gateway.metering.metering_metrics import MAX_TENANTS, MeteringMetrics
from gateway.telemetry.labels import OTHER, FirstSeen
from gateway.telemetry.metrics import MAX_REASONS, Metrics
from gateway.telemetry.record import RequestRecord

NUM_HOSTILE = 100_000


def num_series(registry: CollectorRegistry) -> int:
    return sum(len(family.samples) for family in registry.collect())


def posting(tenant: str, model: str) -> Posting:
    return Posting(
        kind="settle",
        request_id="req_1",
        outcome="ok",
        tenant_id=tenant,
        key_id="key_1",
        model=model,
        root="r",
        tier="interactive",
        price_version="v1",
        currency="USD",
        opened_at_ms=0,
        ended_at_ms=1,
        usage=Usage(1, 2, 3, 4),
        charge=Charge(10, 1, 2, 3, 4),
    )


def record(number: int, *, model: str, status: int = 200) -> RequestRecord:
    made = RequestRecord(f"req_{number}", "POST", route="/v1/chat/completions", status=status, model=model)
    made.client_request_id, made.peer = f"agent-{number}", f"10.0.{number // 256}.{number % 256}"
    made.tier, made.stream = "interactive", True
    return made


def test_attack_F07_hostile_models_paths_and_agents_make_no_series() -> None:
    metrics = Metrics(0)
    metrics.serve_models(["served"])
    for name in ("served", "not served"):
        metrics.observe(record(0, model=name))
        unknown = record(0, model=name, status=404)
        unknown.route = "_unmatched"
        metrics.observe(unknown)
    before = num_series(metrics.registry)
    for number in range(NUM_HOSTILE // 2):
        metrics.observe(record(number, model=f"model-{number}\n{{}}"))
        unknown = record(number, model=f"m{number}", status=404)
        unknown.route = "_unmatched"  # as the middleware leaves it for a path that no route has
        metrics.observe(unknown)
    assert num_series(metrics.registry) == before


def test_error_codes_are_bounded_even_if_one_carried_a_clients_text() -> None:
    metrics = Metrics(0)
    for number in range(10 * MAX_REASONS):
        refused = record(number, model="m", status=400)
        refused.error_code = f"code-{number}"
        metrics.observe(refused)
    reasons = {s.labels["reason"] for f in metrics.admissions.collect() for s in f.samples}
    assert len(reasons) == MAX_REASONS + 1
    assert OTHER in reasons


def test_tenants_beyond_the_first_share_a_series_and_no_token_is_lost() -> None:
    registry = CollectorRegistry()
    metrics = MeteringMetrics(registry, lambda name: name if name == "served" else OTHER)
    for number in range(NUM_HOSTILE // 10):
        metrics.charged(posting(f"tenant-{number}", f"model-{number}"))
    samples = [s for f in registry.collect() for s in f.samples if s.name == "headgate_tokens_total"]
    assert len({s.labels["tenant"] for s in samples}) == MAX_TENANTS + 1
    assert {s.labels["model"] for s in samples} == {OTHER}
    assert sum(s.value for s in samples) == 10 * NUM_HOSTILE // 10


def test_a_void_is_not_counted_as_charged() -> None:
    registry = CollectorRegistry()
    void = Posting(**{**{f: getattr(posting("t", "m"), f) for f in Posting.__struct_fields__}, "kind": "void"})
    MeteringMetrics(registry).charged(void)
    assert [s for f in registry.collect() for s in f.samples if s.name == "headgate_tokens_total"] == []


def test_a_known_value_keeps_its_label_after_the_table_is_full() -> None:
    seen = FirstSeen(2)
    assert [seen.label(v) for v in ("a", "b", "c", "a", "b", "d")] == ["a", "b", OTHER, "a", "b", OTHER]


def test_only_sampled_requests_leave_an_exemplar() -> None:
    metrics = Metrics(0)
    metrics.serve_models(["served"])
    for flag, trace in (("00", "a" * 32), ("01", "b" * 32)):
        made = record(0, model="served")
        made.outgoing_traceparent = f"00-{trace}-{'c' * 16}-{flag}"
        made.mark("first_byte")
        made.mark("last_byte")
        metrics.observe(made)
    page = metrics.page("application/openmetrics-text").body.decode()
    assert f'# {{trace_id="{"b" * 32}"}}' in page
    assert "a" * 32 not in page
