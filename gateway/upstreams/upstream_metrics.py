"""Upstreams as metrics. The labels are names that the operator declared, and fixed words."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from accounting.upstreams.cost_days import NAMES
from gateway.upstreams.cost_puller import CostPuller
from gateway.upstreams.market import Market

STATES = {"closed": 0.0, "half_open": 1.0, "open": 2.0}


class CostMetrics(Collector):
    """Metrics of what providers bill by the day. All gateways show the same amounts; each shows its own pulls."""

    def __init__(self, puller: CostPuller) -> None:
        self._puller = puller

    def collect(self) -> Iterator[Metric]:
        one = ["upstream"]
        read = GaugeMetricFamily(
            "headgate_upstream_costs_pulled_timestamp_seconds",
            "Time of the last reading of the provider's cost API that succeeded; 0 before the first.",
            labels=one,
        )
        billed = GaugeMetricFamily(
            "headgate_upstream_billed_micro_units", "What the provider bills for the last 31 days.", labels=one
        )
        drift = GaugeMetricFamily(
            "headgate_upstream_cost_drift_micro_units",
            "What the provider bills for the last 31 days beyond the expected, by the name of the drift.",
            labels=["upstream", "account"],
        )
        pulls = CounterMetricFamily(
            "headgate_upstream_cost_pulls",
            "Readings of the provider's cost API, by how they ended.",
            labels=[*one, "end"],
        )
        for name, found in self._puller.figures.items():
            read.add_metric([name], found.state.pulled_at_ms / 1000)
            billed.add_metric([name], found.sums.billed + found.sums.credit)
            for account in NAMES:
                if account:
                    drift.add_metric([name, account], found.sums.drift.get(account, 0))
        for (name, end), count in self._puller.ended.items():
            pulls.add_metric([name, end], count)
        yield from (read, billed, drift, pulls)


class UpstreamMetrics(Collector):
    def __init__(self, market: Market) -> None:
        self._market = market

    def collect(self) -> Iterator[Metric]:
        one = ["upstream"]
        state = GaugeMetricFamily(
            "headgate_upstream_breaker", "The breaker of an upstream: 0 closed, 1 half open, 2 open.", labels=one
        )
        running = GaugeMetricFamily("headgate_upstream_running", "Requests that run at an upstream.", labels=one)
        first = GaugeMetricFamily(
            "headgate_upstream_first_token_seconds", "Time to the first token, as a moving average.", labels=one
        )
        ended = CounterMetricFamily(
            "headgate_upstream_attempts", "Attempts at an upstream, by how they ended.", labels=["upstream", "end"]
        )
        drift = CounterMetricFamily(
            "headgate_upstream_drift_tokens",
            "Tokens by which a provider's statement differs from what was judged, by the name of the drift.",
            labels=["upstream", "drift"],
        )
        cost = CounterMetricFamily(
            "headgate_upstream_expected_cost_micro_units", "What the provider should charge.", labels=one
        )
        for name, place in self._market.places.items():
            state.add_metric([name], STATES[place.state])
            running.add_metric([name], place.num_running)
            first.add_metric([name], place.first_token_s)
            cost.add_metric([name], place.expected_cost)
            for end, count in place.attempts.items():
                ended.add_metric([name, end], count)
            for kind, tokens in place.drift.items():
                drift.add_metric([name, kind], tokens)
        overflows = CounterMetricFamily(
            "headgate_overflow_requests", "Requests for models of our own that upstreams answered.", labels=["reason"]
        )
        for reason, count in self._market.num_overflows.items():
            overflows.add_metric([reason], count)
        yield from (state, running, first, ended, drift, cost, overflows)
