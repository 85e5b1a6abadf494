"""Bytes of uploaded and produced files on one disk, encrypted in parts so that any range can be read.

A file appears whole or not at all: it is written under a temporary name, synced and renamed. Its name is a random
storage key; the name that a client gave it is not known here. Calls are synchronous: callers on an event loop use a
thread. The module knows no SQL.

A file consists of parts of `PART_BYTES` plain bytes, the last of which has fewer, perhaps none. Each part has its own nonce and tag and is bound to (storage key,
part number).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from accounting.database.sealing import NONCE_BYTES, TAG_BYTES, seal, unseal

logger = logging.getLogger(__name__)

PART_BYTES = 64 * 1024
_SEALED_BYTES = PART_BYTES + NONCE_BYTES + TAG_BYTES


class FileStore:
    """A folder of stored files. Several processes may share it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._unfinished = root / "unfinished"

    def create(self, data_key: bytes) -> Writer:
        self._unfinished.mkdir(parents=True, exist_ok=True, mode=0o700)
        storage_key = secrets.token_hex(16)
        return Writer(storage_key, data_key, self._unfinished / storage_key, self._root)

    def open(self, storage_key: str, data_key: bytes) -> Reader:
        """Opens a file to read it. Raises `FileNotFoundError`."""
        return Reader(storage_key, data_key, self._root / storage_key)

    def delete(self, storage_key: str) -> None:
        (self._root / storage_key).unlink(missing_ok=True)

    def drop_unfinished(self, older_than: float) -> None:
        """Deletes files that a killed process left half written. `older_than` is a Unix time. A file that cannot be
        deleted is told in the log and stays."""
        if not self._unfinished.is_dir():
            return
        for path in self._unfinished.iterdir():
            try:
                if path.stat().st_mtime < older_than:
                    path.unlink()
            except FileNotFoundError:  # its writer has finished it, or another sweeper was quicker
                continue
            except OSError as error:
                logger.warning("unfinished_file_not_deleted", extra={"file": path.name, "reason": str(error)[:200]})


class Writer:
    """Writes one file. The caller ends it by `finish` or by `abort`."""

    def __init__(self, storage_key: str, data_key: bytes, path: Path, folder: Path) -> None:
        self.storage_key = storage_key
        self.num_bytes = 0
        self._data_key = data_key
        self._path, self._folder = path, folder
        self._hash = hashlib.sha256()
        self._rest = bytearray()
        self._num_parts = 0
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb", buffering=PART_BYTES)  # without a buffer a full disk may write less

    def write(self, data: bytes) -> None:
        self._hash.update(data)
        self.num_bytes += len(data)
        self._rest += data
        while len(self._rest) >= PART_BYTES:
            self._write_part(bytes(self._rest[:PART_BYTES]))
            del self._rest[:PART_BYTES]

    def finish(self) -> str:
        """Makes the file durable and visible; returns the SHA-256 of its plain bytes."""
        self._write_part(bytes(self._rest))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._path.rename(self._folder / self.storage_key)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return self._hash.hexdigest()

    def abort(self) -> None:
        with contextlib.suppress(OSError):  # what is in its buffer may find no space
            self._file.close()
        self._path.unlink(missing_ok=True)

    def _write_part(self, part: bytes) -> None:
        self._file.write(seal(self._data_key, part, _place(self.storage_key, self._num_parts)))
        self._num_parts += 1


class Reader:
    """Reads one file. Raises `SealBroken` if the bytes are not those that were written, or if the last are missing."""

    def __init__(self, storage_key: str, data_key: bytes, path: Path) -> None:
        self._storage_key, self._data_key = storage_key, data_key
        self._file = path.open("rb")
        self._cached: tuple[int, bytes] = (-1, b"")

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Returns that range, or less at the end of the file."""
        found = bytearray()
        while len(found) < num_bytes:
            number, start = divmod(offset + len(found), PART_BYTES)
            part = self._part(number)
            piece = part[start : start + num_bytes - len(found)]
            if not piece:
                break
            found += piece
        return bytes(found)

    def parts(self) -> Iterator[bytes]:
        """Yields the whole file in order, part by part."""
        for number in itertools.count():
            if part := self._part(number):
                yield part
            if len(part) < PART_BYTES:
                return

    def close(self) -> None:
        self._file.close()

    def _part(self, number: int) -> bytes:
        if self._cached[0] != number:
            self._file.seek(number * _SEALED_BYTES)
            sealed = self._file.read(_SEALED_BYTES)
            place = _place(self._storage_key, number)
            self._cached = (number, unseal(self._data_key, sealed, place))
        return self._cached[1]


def _place(storage_key: str, number: int) -> bytes:
    return f"{storage_key}/{number}".encode()
