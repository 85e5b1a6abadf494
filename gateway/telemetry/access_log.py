"""The access log: one line per request. Requests that end in one turn of the loop have their lines written together."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from gateway.telemetry.record import RequestRecord
from workers.process.logs import ACCESS, handle_together

PROBES = frozenset({"/livez", "/readyz", "/health", "/metrics"})

_logger = logging.getLogger(ACCESS)


def write(records: Sequence[RequestRecord]) -> None:
    lines = [_line(record, level) for record in records if _logger.isEnabledFor(level := _level(record))]
    if lines:
        handle_together(_logger, lines)


def _level(record: RequestRecord) -> int:
    return logging.DEBUG if record.route in PROBES else logging.INFO


def _line(record: RequestRecord, level: int) -> logging.LogRecord:
    principal = record.principal
    # `log` would look for the caller's line first, which no line tells, and `extra` would be compared name by name.
    line = logging.LogRecord(ACCESS, level, __file__, 0, "request", (), None)
    vars(line).update(
        request_id=record.request_id,
        client_request_id=record.client_request_id or None,
        method=record.method,
        route=record.route,
        status=record.status,
        error_code=record.error_code or None,
        tenant=principal.tenant_id if principal else None,
        key_id=principal.key_id if principal else None,
        model=record.model or None,
        tier=record.tier or None,
        prompt_tokens=record.usage.prompt,
        cached_tokens=record.usage.cache_read,
        output_tokens=record.usage.output,
        charge_micro_units=record.charge_micro_units,
        finish_reasons=",".join(record.finish_reasons) or None,
        disconnect_phase=record.disconnect_phase or None,
        ttft_ms=_rounded(record.offset_ms("first_byte")),
        duration_ms=_rounded(record.offset_ms("last_byte")),
    )
    return line


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
