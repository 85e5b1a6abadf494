"""The gauge of budgets says what is so now, and nothing that was so before."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from accounting.values import clock
from accounting.values.budget_types import Budget
from accounting.values.types import Limits, Principal
from gateway.limiter.limits import Money, Verdict
from gateway.limiter.rules import LimitSubject
from gateway.metering.metering_metrics import MeteringMetrics

HOUR_MS = 3_600_000


@pytest.fixture
def now_ms(monkeypatch: pytest.MonkeyPatch) -> int:
    now_ms = 1_790_000_000_000
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms)
    return now_ms


def left(registry: CollectorRegistry) -> float | None:
    return registry.get_sample_value("headgate_budget_remaining_ratio", {"tenant": "proj_1"})


def ask(metrics: MeteringMetrics, now_ms: int, budgets: tuple[Budget, ...], used: int = 0) -> None:
    principal = Principal(
        "tenant",
        "proj_1",
        "key_1",
        frozenset(),
        model_limits=(("m", Limits()),),
        tenant_limits=Limits(),
        budgets=budgets,
    )
    holder = LimitSubject.of("req_1", principal, "m", "interactive", now_ms=now_ms)
    money = {use.row: Money(used, 0) for use in holder.budgets}
    metrics.reserved(holder, Verdict(now_ms, 0, 0, None, 0, money=money))


def test_a_budget_that_is_gone_shows_no_more_that_it_was_nearly_spent(now_ms: int) -> None:
    registry = CollectorRegistry()
    metrics = MeteringMetrics(registry)
    ask(metrics, now_ms, (Budget(id="b", tenant_id="proj_1", period="hour", limit_micro_units=100),), used=95)
    assert left(registry) == pytest.approx(0.05)
    ask(metrics, now_ms, ())
    assert left(registry) is None


def test_what_a_budget_had_left_goes_with_its_period(now_ms: int, monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    ask(
        MeteringMetrics(registry),
        now_ms,
        (Budget(id="b", tenant_id="proj_1", period="hour", limit_micro_units=100),),
        95,
    )
    monkeypatch.setattr(clock, "now_ms", lambda: now_ms + HOUR_MS)
    assert left(registry) is None
