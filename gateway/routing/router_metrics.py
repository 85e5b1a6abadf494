"""Metrics of workers, and of the router's choices and predictions, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import get_args

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.routing.links.fleet import Fleet
from gateway.routing.links.worker_link import WorkerState
from gateway.routing.router import Router

STATES = get_args(WorkerState)


class RouterMetrics(Collector):
    def __init__(self, router: Router, fleet: Fleet, models: Callable[[], Collection[str]]) -> None:
        self._router = router
        self._fleet = fleet
        self._models = models

    def collect(self) -> Iterator[Metric]:
        yield from self._of_workers()
        yield from self._of_choices()

    def _of_workers(self) -> Iterator[Metric]:
        links = self._fleet.links
        ready = GaugeMetricFamily("headgate_ready_workers", "Linked workers that take work.", labels=["model"])
        for model in self._models():
            ready.add_metric([model], sum(link.takes_work for link in links if link.registration.model == model))
        yield ready
        states = GaugeMetricFamily(
            "headgate_worker_state",
            "It is 1 for the present state of a linked worker: ready, draining, disk_full, or silent for some seconds.",
            labels=["worker", "model", "state"],
        )
        for link in links:
            for state in STATES:
                place = [link.registration.worker, link.registration.model, state]
                states.add_metric(place, float(state == link.state))
        yield states
        yield CounterMetricFamily(
            "headgate_worker_links_lost", "Links to workers that ended.", value=self._fleet.num_lost
        )

    def _of_choices(self) -> Iterator[Metric]:
        counts = self._router.counts
        choices = CounterMetricFamily(
            "headgate_router_choices",
            "Choices of a worker, by model and by the reason for the choice.",
            labels=["model", "reason"],
        )
        for choice, number in counts.choices.items():
            choices.add_metric(choice, number)
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
            labels=["model", "kind"],
        )
        for kind, sums in (("predicted", counts.predicted_ttft_s), ("real", counts.ttft_s)):
            for model, total_s in sums.items():
                ttft.add_metric([model, kind], total_s)
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
        for link in self._fleet.links:
            index.add_metric([link.registration.worker], len(link.cached))
        yield index
