"""The gateway's metric families, and the counting of finished requests. Labels are bounded: a client cannot create a
series (operations.md 3.3).
"""

from __future__ import annotations

from collections.abc import Iterable

import prometheus_client
from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram

from gateway.limiter.rules import BudgetUse, Rule
from gateway.telemetry.exposition import Labelled, Page, expose
from gateway.telemetry.record import RequestRecord

DURATION_BUCKETS = tuple(0.01 * 2**i for i in range(14))
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
GENAI_LABELS = ("gen_ai_operation_name", "gen_ai_request_model")
OTHER = "_other"

_OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}


class Metrics:
    """The owner of the registry. Other modules register their own families in `registry`."""

    def __init__(self, slot: int) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no types here
        self.registry = CollectorRegistry()
        self._labelled = CollectorRegistry()
        self._labelled.register(Labelled(self.registry, slot))
        self._models: frozenset[str] = frozenset()
        self.duration = Histogram(
            "gen_ai_server_request_duration_seconds",
            "Seconds from the acceptance of a request to the last byte of its answer.",
            GENAI_LABELS,
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )
        self.first_token = Histogram(
            "gen_ai_server_time_to_first_token_seconds",
            "Seconds from the acceptance of a request to the first byte of its stream.",
            GENAI_LABELS,
            buckets=DURATION_BUCKETS,
            registry=self.registry,
        )
        self.per_token = Histogram(
            "gen_ai_server_time_per_output_token_seconds",
            "Seconds per output token after the first: (duration - time to first token) / (output tokens - 1).",
            GENAI_LABELS,
            buckets=PER_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self.requests = Counter(
            "headgate_requests",
            "Requests that have finished.",
            ("route", "model", "tier", "outcome"),
            registry=self.registry,
        )
        self.disconnects = Counter(
            "headgate_client_disconnects",
            "Clients that disconnected before their answer was complete.",
            ("phase",),
            registry=self.registry,
        )
        self.loop_lag = Histogram(
            "headgate_event_loop_lag_seconds",
            "Seconds by which a timer of 100 ms fires too late.",
            buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0),
            registry=self.registry,
        )
        self.shadow_refusals = Counter(
            "headgate_shadow_refusals",
            "Requests that a limit or budget in shadow mode would have refused.",
            ("level", "dimension"),
            registry=self.registry,
        )

    def note_shadow(self, limit: Rule | BudgetUse) -> None:
        if isinstance(limit, Rule):
            level, dimension = str(limit.level), str(limit.dimension)
        else:
            level, dimension = limit.budget.scope, "budget_micro_units"
        self.shadow_refusals.labels(level, dimension).inc()

    def serve_models(self, models: Iterable[str]) -> None:
        """Sets the only values of the label `model`; all other names become `_other`."""
        self._models = frozenset(models)

    def page(self, accept: str) -> Page:
        return expose(self._labelled, accept)

    def observe(self, record: RequestRecord) -> None:
        model = self._model(record.model)
        self.requests.labels(record.route, model, record.tier or "none", outcome_of(record)).inc()
        if record.disconnect_phase:
            self.disconnects.labels(record.disconnect_phase).inc()
        operation = _OPERATIONS.get(record.route)
        if operation is None or record.status != 200:
            return
        end_ms, first_ms = record.offset_ms("last_byte"), record.offset_ms("first_byte")
        if end_ms is not None:
            self.duration.labels(operation, model).observe(end_ms / 1e3)
        if record.stream and end_ms is not None and first_ms is not None:
            self.first_token.labels(operation, model).observe(first_ms / 1e3)
            if record.usage.output > 1:
                per_token = (end_ms - first_ms) / 1e3 / (record.usage.output - 1)
                self.per_token.labels(operation, model).observe(per_token)

    def _model(self, name: str) -> str:
        """Returns the label of a model. A model with an adapter counts as its base model."""
        base = name.rpartition(":")[0]
        return next((known for known in (name, base) if known in self._models), OTHER)


def outcome_of(record: RequestRecord) -> str:
    if record.disconnect_phase or record.status == 499:
        return "client_gone"
    if record.status >= 500 or (record.status == 200 and record.error_code):
        return "server_error"
    if record.status == 429:
        return "refused"
    return "client_error" if record.status >= 400 else "ok"


METRICS = web.AppKey("metrics", Metrics)
