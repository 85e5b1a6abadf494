"""Metrics of waiting and refused work before admission, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from gateway.intake.body_checker import BodyChecker
from gateway.intake.intake import Intake
from gateway.intake.text_work import TextWork


class IntakeMetrics(Collector):
    def __init__(self, intake: Intake, work: TextWork, checker: BodyChecker) -> None:
        self._intake = intake
        self._work = work
        self._checker = checker

    def collect(self) -> Iterator[Metric]:
        intake, work = self._intake, self._work
        yield CounterMetricFamily(
            "headgate_body_bytes", "Bytes of request bodies that were accepted.", value=intake.num_taken
        )
        yield GaugeMetricFamily(
            "headgate_body_bytes_held", "Bytes of the bodies of requests that run now.", value=intake.num_held
        )
        refused = CounterMetricFamily(
            "headgate_body_refusals", "Request bodies that were refused because of their size.", labels=["dimension"]
        )
        for dimension, number in intake.refusals.items():
            refused.add_metric([dimension], number)
        yield refused
        yield GaugeMetricFamily(
            "headgate_text_waiting_requests",
            "Requests that wait now for a thread to process their text.",
            value=work.num_waiting,
        )
        yield GaugeMetricFamily(
            "headgate_text_waiting_bytes",
            "Bytes of the bodies of requests that wait now for a thread to process their text.",
            value=work.num_waiting_bytes,
        )
        checked = CounterMetricFamily(
            "headgate_large_bodies",
            "Bodies of more than 64 KiB by where they were checked: in a process of their own, or in the gateway.",
            labels=["where"],
        )
        for where, number in self._checker.num_checked.items():
            checked.add_metric([where], number)
        yield checked
