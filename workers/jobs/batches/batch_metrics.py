"""Metrics of batches, read at each scrape from what was last read of SQL, and from the counts of the children."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from accounting.batches.batch_figures import BATCH_STATES, OPEN_CHUNKS, BatchFigures
from workers.jobs.base.tally import Counted, Tally

EVERY_S = 10.0
"""Seconds between two looks at SQL."""
RETRIES: tuple[Counted, ...] = ("busy", "running", "failed")


class BatchMetrics(Collector):
    def __init__(self, tally: Tally, pulse: Path) -> None:
        """`pulse` is the file that is touched whenever a message is received."""
        self.figures = BatchFigures(dict.fromkeys(BATCH_STATES, 0), dict.fromkeys(OPEN_CHUNKS, 0), {}, 0)
        self.num_expired = 0
        """The number of claims that ran out and that this process put back into the queue."""
        self._tally = tally
        self._pulse = pulse

    def collect(self) -> Iterator[Metric]:
        figures = self.figures
        for name, text, numbers in (
            ("headgate_batches", "Batches by state.", figures.batches),
            ("headgate_batch_chunks", "Chunks that wait or run.", figures.chunks),
            ("headgate_batch_lines", "Lines that wait, run, or have ended.", figures.lines),
        ):
            family = GaugeMetricFamily(name, text, labels=["state"])
            for state, number in numbers.items():
                family.add_metric([state], number)
            yield family
        yield GaugeMetricFamily(
            "headgate_batch_oldest_queued_seconds",
            "Age of the oldest batch with a chunk that nobody runs.",
            value=figures.oldest_queued_s,
        )
        yield from self._of_runners()
        yield GaugeMetricFamily(
            "headgate_jobs_last_consume_age_seconds",
            "Time since the Celery worker last received a message.",
            value=self._silent_s(),
        )

    def _of_runners(self) -> Iterator[Metric]:
        counts = self._tally.read()
        retries = CounterMetricFamily(
            "headgate_batch_line_retries",
            "Lines that were sent again: the gateway was busy, the line's key was running, or it failed.",
            labels=["class"],
        )
        for name in RETRIES:
            retries.add_metric([name], counts[name])
        yield retries
        yield CounterMetricFamily(
            "headgate_batch_fence_rejects", "Runs that lost their claim.", value=counts["fence_reject"]
        )
        yield CounterMetricFamily(
            "headgate_batch_lines_quarantined",
            "Lines that were given up because they crashed their runner again and again.",
            value=counts["quarantined"],
        )
        yield CounterMetricFamily(
            "headgate_batch_claims_expired", "Claims that ran out and were put back.", value=self.num_expired
        )

    def _silent_s(self) -> float:
        try:
            return max(0.0, time.time() - self._pulse.stat().st_mtime)
        except FileNotFoundError:  # the Celery worker is starting
            return 0.0
