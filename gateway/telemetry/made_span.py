"""A planned span with its ids, as the queue holds it and an exporter takes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opentelemetry.trace import SpanContext

from gateway.telemetry import names
from gateway.telemetry.spans import PlannedSpan


@dataclass(frozen=True, slots=True)
class MadeSpan:
    planned: PlannedSpan
    context: SpanContext
    parent: SpanContext | None
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
