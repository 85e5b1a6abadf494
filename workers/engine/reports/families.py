"""The kinds of metric families that a worker adds to the client library's own. The module knows no engine and no
socket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)


class Families:
    """Makes families that all carry the same labels: the worker's model and slot, as vLLM's dashboards expect them."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self.registry = registry
        self.labels = labels

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self.labels), registry=self.registry).labels(**self.labels)

    def counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self.labels), registry=self.registry).labels(**self.labels)

    def seconds(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, SECONDS)

    def tokens(self, name: str, text: str) -> Histogram:
        return self._histogram(name, text, TOKENS)

    def weighted(self, name: str, text: str) -> WeightedHistogram:
        """Makes a histogram of seconds that takes equal values together."""
        made = WeightedHistogram(name, text, self.labels, SECONDS)
        self.registry.register(made)
        return made

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, list(self.labels), buckets=buckets, registry=self.registry)
        return histogram.labels(**self.labels)


def histogram_family(
    name: str, text: str, labels: dict[str, str], bounds: Sequence[float], counts: Sequence[int], total: float
) -> HistogramMetricFamily:
    """Returns a histogram. `counts` has one number for each bound, and one for values above all bounds."""
    made = HistogramMetricFamily(name, text, labels=list(labels))
    buckets, below = [], 0
    for bound, count in zip((*(str(float(bound)) for bound in bounds), "+Inf"), counts, strict=True):
        below += count
        buckets.append((bound, below))
    made.add_metric(list(labels.values()), buckets, total)
    return made


class WeightedHistogram(Collector):
    """A histogram that takes equal values together. 256 sequences whose tokens are equally far apart cost as much as
    one."""

    def __init__(self, name: str, text: str, labels: dict[str, str], bounds: tuple[float, ...]) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Iterator[HistogramMetricFamily]:
        yield histogram_family(self._name, self._text, self._labels, self._bounds, self._counts, self._sum)
