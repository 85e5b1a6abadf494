"""Metrics of workers, and of the router's choices and predictions, read at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import get_args

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.routing.links.fleet import Fleet
from gateway.routing.links.worker_link import WorkerState
from gateway.routing.router import Router

STATES = get_args(WorkerState)


class RouterMetrics(Collector):
    def __init__(self, router: Router, fleet: Fleet, vocabularies: Callable[[], Mapping[str, str]]) -> None:
        """`vocabularies` returns the served models with the digests of their vocabularies."""
        self._router = router
        self._fleet = fleet
        self._vocabularies = vocabularies

    def collect(self) -> Iterator[Metric]:
        yield from self._of_workers()
        yield from self._of_choices()

    def _of_workers(self) -> Iterator[Metric]:
        vocabularies = self._vocabularies()
        found = [
            (link.registration, link.state(vocabularies.get(link.registration.model, ""))) for link in self._fleet.links
        ]
        ready = GaugeMetricFamily("headgate_ready_workers", "Linked workers that take work.", labels=["model"])
        for model in vocabularies:
            ready.add_metric([model], sum(state == "ready" for worker, state in found if worker.model == model))
        yield ready
        states = GaugeMetricFamily(
            "headgate_worker_state",
            "It is 1 for the present state of a linked worker: ready, draining, disk_full, silent for some seconds, or"
            " other_tokenizer (than the gateway has read).",
            labels=["worker", "model", "state"],
        )
        for worker, present in found:
            for state in STATES:
                states.add_metric([worker.worker, worker.model, state], float(state == present))
        yield states
        yield CounterMetricFamily(
            "headgate_worker_links_lost", "Links to workers that ended.", value=self._fleet.num_lost
        )
        yield CounterMetricFamily(
            "headgate_worker_links_refused",
            "Links to workers that did not come up because one side did not trust the other.",
            value=self._fleet.num_refused,
        )

        num_suspects, num_refused = self._fleet.quarantine.counts()
        yield GaugeMetricFamily(
            "headgate_suspected_requests",
            "Requests in whose first steps a worker ended, and which have not got through these since.",
            value=num_suspects,
        )
        yield GaugeMetricFamily(
            "headgate_quarantined_requests",
            "Suspected requests that are refused, because two or three workers ended.",
            value=num_refused,
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
        resumes = CounterMetricFamily(
            "headgate_request_resumes",
            "Requests whose worker was lost: another worker went on with them (resumed), or none did in time (failed).",
            labels=["outcome"],
        )
        for outcome, number in counts.resumes.items():
            resumes.add_metric([outcome], number)
        yield resumes
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
