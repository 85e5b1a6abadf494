"""Logs: one JSON object per line on stderr. They have no text of a prompt, no header value, no key; hostile values are
harmless.

The process has only this formatter, and it does the redaction, so every handler is redacted.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import traceback
from typing import Any

from gateway.telemetry.record import RequestRecord

MAX_VALUE_CHARS = 1024
MAX_EQUAL_PER_S = 10
PROBES = frozenset({"/livez", "/readyz", "/health", "/metrics"})

_KEY = re.compile(r"hg_(?:live|test|admin|batch)_[A-Za-z0-9_]+|(?i:bearer) +[!-~]+|(?i:cookie): *[!-~ ]+")
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
access_logger = logging.getLogger("gateway.access")


def clean(value: object) -> object:
    """Returns a value that may appear in a line: redacted, cut, without control or line-separating characters."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = _KEY.sub("[redacted]", str(value)[: 4 * MAX_VALUE_CHARS])[:MAX_VALUE_CHARS]
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)[:MAX_VALUE_CHARS]


class JsonFormatter(logging.Formatter):
    """A formatter: `event` is the fixed message, the rest are key-values given as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "event": clean(record.getMessage()),
            "logger": record.name,
        }
        for name, value in record.__dict__.items():
            if name not in _STANDARD:
                line[name] = clean(value)
        if record.exc_info and record.exc_info[1] is not None:
            line["error"] = clean(f"{type(record.exc_info[1]).__name__}: {record.exc_info[1]}")
            line["at"] = [clean(f"{f.filename}:{f.lineno} {f.name}") for f in _frames(record.exc_info[1])]
        return json.dumps(line, ensure_ascii=True, default=str)


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Returns places only: source lines and locals may hold a prompt."""
    return list(traceback.extract_tb(error.__traceback__))[-8:]


class Repeats(logging.Filter):
    """A filter of repeats: more than 10 equal events a second are counted, and the next one let through reports their
    number.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, str], tuple[int, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == access_logger.name:
            return True
        key = (record.name, str(record.msg)[:80])
        second, count = self._seen.get(key, (0, 0))
        now = int(record.created)
        if now == second:
            self._seen[key] = (second, count + 1)
            return count < MAX_EQUAL_PER_S
        if count > MAX_EQUAL_PER_S:
            record.num_suppressed = count - MAX_EQUAL_PER_S
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[key] = (now, 1)
        return True


def configure(level: str) -> None:
    """Takes over the process's root logger. The start of the process calls it once."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(Repeats())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("aiohttp").setLevel(logging.WARNING)


def access(record: RequestRecord) -> None:
    """Writes the access log: one line per request."""
    principal = record.principal
    access_logger.log(
        logging.DEBUG if record.route in PROBES else logging.INFO,
        "request",
        extra={
            "request_id": record.request_id,
            "client_request_id": record.client_request_id or None,
            "method": record.method,
            "route": record.route,
            "status": record.status,
            "error_code": record.error_code or None,
            "tenant": principal.tenant_id if principal else None,
            "key_id": principal.key_id if principal else None,
            "model": record.model or None,
            "tier": record.tier or None,
            "prompt_tokens": record.usage.prompt,
            "cached_tokens": record.usage.cache_read,
            "output_tokens": record.usage.output,
            "charge_micro_units": record.charge_micro_units,
            "finish_reasons": ",".join(record.finish_reasons) or None,
            "disconnect_phase": record.disconnect_phase or None,
            "ttft_ms": _rounded(record.offset_ms("first_byte")),
            "duration_ms": _rounded(record.offset_ms("last_byte")),
        },
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
