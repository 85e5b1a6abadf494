"""Records that SQL will never take: they are kept next to the journal, for a person to look at."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

from workers.process.logs import text_of

log = logging.getLogger(__name__)

DEAD_LETTERS = "dead-letters.jsonl"


def bury(directory: Path, what: object, seq: int, reason: Exception) -> None:
    """Keeps one record, durably. Raises OSError."""
    log.critical("journal record %d cannot be posted: %s", seq, text_of(reason))
    line = json.dumps({"seq": seq, "reason": str(reason), "record": what}) + "\n"
    descriptor = os.open(directory / DEAD_LETTERS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(line.encode())
        file.flush()
        os.fsync(descriptor)
