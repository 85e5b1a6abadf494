"""One page of metrics over several gateways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from workers.process.metrics_text import Page, expose


class Labelled(Collector):
    """The families of another registry, each sample with the label `gateway` added."""

    def __init__(self, inner: CollectorRegistry, slot: int) -> None:
        self._inner = inner
        self._slot = str(slot)

    def collect(self) -> Iterator[Metric]:
        for family in self._inner.collect():
            family.samples = [
                sample._replace(labels={**sample.labels, "gateway": self._slot}) for sample in family.samples
            ]
            yield family


class Gathered(Collector):
    """The pages of several processes as one: samples of equal families together."""

    def __init__(self, pages: Iterable[tuple[str, str | None]]) -> None:
        """Takes pairs (slot, OpenMetrics page, which has exemplars, or None for a process that does not answer)."""
        self._pages = list(pages)

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily(
            "headgate_gateway_up", "Whether the gateway process answers: 1 if it does, otherwise 0.", labels=["gateway"]
        )
        families: dict[str, Metric] = {}
        for slot, page in self._pages:
            up.add_metric([slot], 0.0 if page is None else 1.0)
            for family in _families(page):
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples += family.samples
        yield up
        yield from families.values()


def _families(page: str | None) -> Iterable[Metric]:
    return () if page is None else text_string_to_metric_families(page)  # type: ignore[no-untyped-call]  # the library has no type for it


def gathered(pages: Iterable[tuple[str, str | None]], accept: str) -> Page:
    registry = CollectorRegistry()
    registry.register(Gathered(pages))
    return expose(registry, accept)
