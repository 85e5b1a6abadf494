"""Logs as one JSON object per line on stderr: ts, level, event, logger and the fields of `extra`. For an error they
have file names and line numbers, but no source lines. Bodies and secrets of webhooks and batches are not logged."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime

MAX_VALUE_CHARS = 1024
MAX_FRAMES = 8
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "event": record.getMessage()[:MAX_VALUE_CHARS],
            "logger": record.name,
        }
        for name, value in vars(record).items():
            if name not in _STANDARD:
                plain = value is None or isinstance(value, int | float)
                line[name] = value if plain else str(value)[:MAX_VALUE_CHARS]
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = f"{type(error).__name__}: {error}"[:MAX_VALUE_CHARS]
            frames = traceback.extract_tb(error.__traceback__)[-MAX_FRAMES:]
            line["at"] = [f"{one.filename}:{one.lineno} {one.name}" for one in frames]
        return json.dumps(line)  # ASCII only, so control and line-separating characters are escaped


def configure() -> None:
    """Take over the root logger. The process calls it once, at its start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    logging.captureWarnings(True)
    for name in ("celery", "kombu"):
        logging.getLogger(name).setLevel(logging.WARNING)
