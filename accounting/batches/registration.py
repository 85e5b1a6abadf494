"""The bytes of a new file whose registration raised an error: they are deleted, unless their row is there after all.

A COMMIT may take place although its answer is lost. Deleting the bytes then would lose what a batch was paid for.
"""

from __future__ import annotations

import asyncio
import logging

from sqlalchemy.exc import SQLAlchemyError

from accounting.batches import files
from accounting.batches.file_store import FileStore
from accounting.database.db import Database

logger = logging.getLogger(__name__)

ASK_S = 10.0
WAITS_S = (0.2, 1.0, 3.0)
"""Seconds to wait after each try that SQL did not answer."""


async def discard(database: Database, store: FileStore, storage_key: str) -> None:
    """Deletes stored bytes unless a row names them. Where SQL cannot be asked they stay, and the log names them."""
    if await _may_be_registered(database, storage_key):
        return
    await asyncio.to_thread(store.delete, storage_key)


async def _may_be_registered(database: Database, storage_key: str) -> bool:
    for wait_s in WAITS_S:
        try:
            async with asyncio.timeout(ASK_S), database.write() as conn:
                return await files.is_registered(conn, storage_key)
        except (SQLAlchemyError, OSError):
            await asyncio.sleep(wait_s)
    logger.error("file_kept_unasked", extra={"storage_key": storage_key})
    return True
