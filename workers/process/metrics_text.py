"""A process's metrics as text, in the two formats of Prometheus, without the client library's negotiation.

With OpenMetrics but without UTF-8 names the library would turn `vllm:x` into `vllm_x` (operations.md 3.1), so the
encoder is chosen here. That is valid while every name matches `[a-zA-Z_:][a-zA-Z0-9_:]*`.
"""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@dataclass(frozen=True)
class Page:
    body: bytes
    content_type: str


def expose(registry: CollectorRegistry, accept: str) -> Page:
    if "application/openmetrics-text" in accept:
        body = generate_openmetrics(registry, escaping="allow-utf-8")  # type: ignore[no-untyped-call]  # the library has no types here
        return Page(body, OPENMETRICS)
    return Page(generate_latest(registry), TEXT)
