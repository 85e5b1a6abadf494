"""The bytes of a batch's input file, as its runner reads them, and the error for bytes that cannot be read.

A disk may be away for a while, so a batch waits for its input until its time is over. It ends without it when it is
cancelled or expires.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from accounting.batches.file_store import FileStore, Reader
from accounting.batches.files import FileInfo
from accounting.database.sealing import SealBroken

UNREADABLE: Final = "input_file_unreadable"
"""The reason of a pause, and the code of a batch that failed by it."""


class InputUnreadable(Exception):
    """The bytes of the input file are gone or damaged."""


@contextmanager
def opened(store: FileStore, source: FileInfo, data_key: bytes) -> Iterator[Reader]:
    """Opens a batch's input. Raises `InputUnreadable`, also for damage that the caller finds while it reads."""
    if not source.storage_key:  # it was purged
        raise InputUnreadable
    try:
        reader = store.open(source.storage_key, data_key)
    except FileNotFoundError as error:
        raise InputUnreadable from error
    try:
        yield reader
    except SealBroken as error:
        raise InputUnreadable from error
    finally:
        reader.close()
