"""Records that SQL will never take: they are kept next to the journal, for a person to look at."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from sqlalchemy.exc import SQLAlchemyError

from accounting.database.db import is_rows_fault
from accounting.values.errors import AccountingError
from workers.process.logs import text_of

log = logging.getLogger(__name__)

DEAD_LETTERS = "dead-letters.jsonl"

R = TypeVar("R")


def bury(directory: Path, what: object, seq: int, reason: Exception) -> None:
    """Keeps one record, durably. Raises OSError."""
    log.critical("journal record %d cannot be posted: %s", seq, text_of(reason))
    line = json.dumps({"seq": seq, "reason": str(reason), "record": what}) + "\n"
    descriptor = os.open(directory / DEAD_LETTERS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(line.encode())
        file.flush()
        os.fsync(descriptor)


async def post_all(
    rows: Sequence[R], post: Callable[[Sequence[R]], Awaitable[None]], refused: Callable[[R, Exception], None]
) -> None:
    """Posts all rows in one transaction. If a row is at fault, it posts halves, down to that row, which is `refused`."""
    try:
        await post(rows)
    except (SQLAlchemyError, AccountingError, OverflowError) as failure:
        if not is_rows_fault(failure):
            raise
        if len(rows) == 1:
            refused(rows[0], failure)
            return
        middle = len(rows) // 2
        await post_all(rows[:middle], post, refused)
        await post_all(rows[middle:], post, refused)
