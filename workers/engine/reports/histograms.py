"""Histograms that are filled by weight or from sums, which the client library's own cannot be. The module knows no engine
and no socket."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


def family(
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
        yield family(self._name, self._text, self._labels, self._bounds, self._counts, self._sum)
