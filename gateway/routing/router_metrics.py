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
        choices = CounterMetricFamily(
            "headgate_router_choices", "Choices of a worker, by the reason for the choice.", labels=["reason"]
        )
        for reason, number in counts.choices.items():
            choices.add_metric([reason], number)
        yield choices
        tokens = CounterMetricFamily(
            "headgate_router_cached_tokens",
            "Cached prompt tokens of finished requests: predicted at the choice of a worker, found by the worker, and"
            " how many too many or too few were predicted.",
            labels=["kind"],
        )
        tokens.add_metric(["predicted"], counts.num_predicted_tokens)
        tokens.add_metric(["real"], counts.num_cached_tokens)
        tokens.add_metric(["overestimated"], counts.num_over_tokens)
        tokens.add_metric(["underestimated"], counts.num_under_tokens)
        yield tokens
        ttft = CounterMetricFamily(
            "headgate_router_ttft_seconds",
            "Seconds to the first token, summed over finished requests: predicted at the choice, and measured on the"
            " worker.",
            labels=["kind"],
        )
        ttft.add_metric(["predicted"], counts.predicted_ttft_s)
        ttft.add_metric(["real"], counts.ttft_s)
        yield ttft
        yield CounterMetricFamily(
            "headgate_router_other_worker_misses",
            "Requests that missed the cache although another worker had their prompt cached.",
            value=counts.num_other_worker,
        )
        index = GaugeMetricFamily(
            "headgate_router_index_groups",
            "Groups of 64 tokens that the gateway knows to be cached on the worker.",
            labels=["worker"],
        )
        for link in self._links():
            index.add_metric([link.registration.worker], len(link.cached))
        yield index
