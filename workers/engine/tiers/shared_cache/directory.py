"""A store in a directory that several workers may share. Each value has a file, which is whole or does not exist.

    values/REGION/NAME      written under another name and renamed
    owners/OWNER/REGION     empty: this owner wrote in that region

The size is checked at the start, and each time this process has written a sixteenth of the bound. Then the oldest files
are deleted, and with the last file of a region its folder and its marks.

The law: a region that has a value has the mark of its owner, or `drop_owner` would not find it. A writer marks before it
writes, and again afterwards: another worker may have deleted the mark meanwhile, which it does if the region is gone,
dropped or empty for long. A drop removes a region again once its mark is deleted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from workers.engine.tiers.shared_cache.store import Bounds, StoreAway

SLACK = 16
"""A writer may exceed the bound by a 1 / `SLACK` part before it checks the size again."""

MARKED_S = 60.0
"""Seconds after which whoever marked a region has written its value, or has failed."""


class DirectoryStore:
    def __init__(self, path: Path, bounds: Bounds, now: Callable[[], float] = time.time) -> None:
        """Opens the store. Raises OSError if it cannot be written."""
        self._values, self._owners = path / "values", path / "owners"
        self._bounds = bounds
        self._now = now
        self._num_unseen = 0
        for folder in (self._values, self._owners):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._trim()

    def get(self, region: str, name: str) -> bytes | None:
        path = self._values / region / name
        with _away():
            try:
                if path.stat().st_mtime < self._now() - self._bounds.ttl_s:
                    return None
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def put(self, owner: str, region: str, name: str, value: bytes) -> None:
        if len(value) > self._bounds.num_bytes:
            raise StoreAway("a value is larger than the store")
        with _away():
            try:
                self._put(owner, region, name, value)
            except FileNotFoundError:  # another worker deleted a folder that was empty
                self._put(owner, region, name, value)
            self._num_unseen += len(value)
            if self._num_unseen > self._bounds.num_bytes // SLACK:
                self._trim()

    def _put(self, owner: str, region: str, name: str, value: bytes) -> None:
        folder = self._values / region
        self._mark(owner, region)
        folder.mkdir(exist_ok=True, mode=0o700)
        self._write(folder / name, value)
        self._mark(owner, region)

    def _mark(self, owner: str, region: str) -> None:
        marks = self._owners / owner
        marks.mkdir(exist_ok=True, mode=0o700)
        (marks / region).touch(mode=0o600)

    def _write(self, path: Path, value: bytes) -> None:
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=".")
        try:
            with open(descriptor, "wb") as file:
                file.write(value)
            os.replace(beside, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise

    def drop_owner(self, owner: str) -> None:
        with _away():
            marks = self._owners / owner
            for mark in list(marks.iterdir()) if marks.is_dir() else ():
                _remove(self._values / mark.name)
                mark.unlink(missing_ok=True)
                _remove(self._values / mark.name)
            with contextlib.suppress(OSError):  # nothing was there, or somebody has written since
                marks.rmdir()

    def close(self) -> None:
        pass

    def _trim(self) -> None:
        """Deletes the values that are too old, then the oldest ones until the rest is within the bound."""
        files = sorted(self._files())
        total, oldest = sum(size for _, size, _ in files), self._now() - self._bounds.ttl_s
        for written, size, path in files:
            if written >= oldest and total <= self._bounds.num_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size
        self._num_unseen = 0
        self._tidy()

    def _tidy(self) -> None:
        """Deletes the folders of regions without a value, and the marks of regions without a folder."""
        for folder in list(os.scandir(self._values)):
            if folder.name.startswith("."):  # a worker is removing it
                continue
            with contextlib.suppress(OSError):  # it has a value
                os.rmdir(folder.path)
        regions, lately = set(os.listdir(self._values)), self._now() - MARKED_S
        for marks in list(os.scandir(self._owners)):
            with contextlib.suppress(FileNotFoundError):  # another worker tidies up as well
                for mark in list(os.scandir(marks.path)):
                    if mark.name not in regions and mark.stat().st_mtime < lately:
                        os.unlink(mark.path)
                        if (self._values / mark.name).exists():
                            self._mark(marks.name, mark.name)
            with contextlib.suppress(OSError):
                os.rmdir(marks.path)

    def _files(self) -> Iterator[tuple[float, int, str]]:
        for region in os.scandir(self._values):
            with contextlib.suppress(FileNotFoundError):  # another worker dropped it
                for entry in os.scandir(region.path):
                    with contextlib.suppress(FileNotFoundError):
                        stat = entry.stat()
                        yield stat.st_mtime, stat.st_size, entry.path


def _remove(folder: Path) -> None:
    # The folder is renamed first: a writer that is in there now fails, or writes to a folder that is being deleted.
    gone = folder.with_name(f".{folder.name}.{os.getpid()}.{time.monotonic_ns()}")
    try:
        os.rename(folder, gone)
    except FileNotFoundError:
        pass
    for left in folder.parent.glob(f".{folder.name}.*"):  # also those of a removal that failed before
        shutil.rmtree(left)


@contextlib.contextmanager
def _away() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreAway(str(error)) from error
