"""A planned span with its ids, as an exporter takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from opentelemetry.trace import SpanContext

from gateway.telemetry import names
from gateway.telemetry.spans import PlannedSpan


class MadeSpan(NamedTuple):
    planned: PlannedSpan
    trace_id: int
    span_id: int
    parent_id: int = 0
    """The parent's span. It is 0 where there is none."""
    is_parent_remote: bool = False
    links: Sequence[SpanContext] = ()

    @property
    def attributes(self) -> dict[str, Any]:
        planned = self.planned
        return {**planned.attributes, names.ERROR_TYPE: planned.error} if planned.error else planned.attributes


class Exporter(Protocol):
    """Takes spans away. Its methods may take long: they run in a thread of their own."""

    def export(self, spans: Sequence[MadeSpan]) -> bool:
        """Returns whether the spans arrived."""

    def close(self) -> None:
        """Ends what waits; called from another thread."""
