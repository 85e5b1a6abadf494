"""Metrics of certificates. The module is apart from `certificates.py`, which every command and every check of settings
loads: the library of metrics takes longer to load than all the rest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector

from workers.process.tls.certificates import Certificate


class CertificateMetrics(Collector):
    """When the certificates of a process end."""

    def __init__(self, certificates: Mapping[str, Certificate]) -> None:
        """The keys say what each certificate is for: `listener` or `links`."""
        self._certificates = certificates

    def collect(self) -> Iterator[Metric]:
        ends = GaugeMetricFamily(
            "headgate_tls_certificate_expires_timestamp_seconds",
            "Unix time at which the certificate in use, or the first of its chain, ends: that of the base URL (listener),"
            " and that of links between gateways and workers (links).",
            labels=["use"],
        )
        unusable = GaugeMetricFamily(
            "headgate_tls_certificate_unusable",
            "It is 1 while the files of a certificate cannot be used, and those of before are.",
            labels=["use"],
        )
        for use, certificate in self._certificates.items():
            ends.add_metric([use], certificate.ends_at)
            unusable.add_metric([use], float(bool(certificate.fault)))
        yield ends
        yield unusable
