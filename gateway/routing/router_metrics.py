"""Metrics of the router's choices and predictions, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.routing.router import Router
from gateway.routing.upstream.native import WorkerLink


class RouterMetrics(Collector):
    def __init__(self, router: Router, links: Callable[[], Iterable[WorkerLink]]) -> None:
        self._router = router
        self._links = links

    def collect(self) -> Iterator[Metric]:
        counts = self._router.counts
        choices = CounterMetricFamily("headgate_router_choices", "Why a worker was chosen.", labels=["reason"])
        for reason, number in counts.choices.items():
            choices.add_metric([reason], number)
        yield choices
        tokens = CounterMetricFamily(
            "headgate_router_cached_tokens",
            "Of finished requests: predicted at the choice, really cached, and the two kinds of error.",
            labels=["kind"],
        )
        tokens.add_metric(["predicted"], counts.num_predicted_tokens)
        tokens.add_metric(["real"], counts.num_cached_tokens)
        tokens.add_metric(["overestimated"], counts.num_over_tokens)
        tokens.add_metric(["underestimated"], counts.num_under_tokens)
        yield tokens
        ttft = CounterMetricFamily(
            "headgate_router_ttft_seconds",
            "Sums over finished requests: time to the first token, predicted and on the worker.",
            labels=["kind"],
        )
        ttft.add_metric(["predicted"], counts.predicted_ttft_s)
        ttft.add_metric(["real"], counts.ttft_s)
        yield ttft
        yield CounterMetricFamily(
            "headgate_router_other_worker_misses",
            "Requests whose prompt another worker had.",
            value=counts.num_other_worker,
        )
        index = GaugeMetricFamily(
            "headgate_router_index_groups",
            "Groups of 64 tokens that a worker is known to have cached.",
            labels=["worker"],
        )
        for link in self._links():
            index.add_metric([link.registration.worker], len(link.cached))
        yield index
