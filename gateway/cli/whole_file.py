"""A file that is written as a whole or not at all, however the command ends. A link stays, and what it leads to is
written so; a device or a pipe is written into and never replaced.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Writes next to the file's path, then renames; removes the temporary file if the block ends by an exception,
    Ctrl-C included.
    """
    target = path.resolve()
    if target.exists() and not target.is_file():
        with path.open("wb") as there:
            yield there
        return
    with _beside(target, path) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644 & ~_umask())
            Path(file.name).replace(target)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _beside(target: Path, given: Path) -> IO[bytes]:
    try:
        return tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=f".{target.name}.", suffix=".partial", delete=False
        )
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(given)) from None  # its own name would tell nobody anything


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
