"""Log lines on stderr, one JSON object per line: ts, level, event, msg and the values of `extra`.

A worker never has the text of a prompt, and token ids are not logged either.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

MAX_VALUE_CHARS = 1024
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "event"}


class JsonFormatter(logging.Formatter):
    def __init__(self, worker: str) -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "event": getattr(record, "event", "log"),
            "msg": record.getMessage()[:MAX_VALUE_CHARS],
            "worker": self._worker,
        }
        for name, value in vars(record).items():
            if name not in _STANDARD:
                line[name] = value if isinstance(value, int | float) else str(value)[:MAX_VALUE_CHARS]
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)[-8 * MAX_VALUE_CHARS :]
        return json.dumps(line)  # the text is ASCII, so control and line-separating characters are escaped


def configure(level: str, worker: str) -> None:
    """Takes over the root logger. It is called once, at the process's start."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(worker))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
