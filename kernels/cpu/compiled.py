"""The compiled functions of a CPU worker, or the reason why there are none.

It knows numba and where its results are stored. Functions are compiled once for a machine and a version of this folder,
in some ten to twenty seconds; later starts load the stored results. Of processes that start together one compiles, and
the others wait for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from kernels.cpu import instructions

log = logging.getLogger(__name__)

MAX_WAIT_S = 120.0
"""The longest wait for another process that compiles, which takes some twenty seconds of a whole core."""


@dataclass(frozen=True)
class Compiled:
    """Addresses of functions that take the address of a job."""

    decode: int
    """The address of `decoder.decode`."""
    multiply: int
    """The address of `product.multiply`."""
    kept: tuple[Any, ...]
    """The objects that own the machine code."""


@cache
def functions() -> Compiled | None:
    """Returns the compiled functions. If there are none it returns None and logs one line; torch's own operations are
    used instead."""
    reason = refusal()
    if reason:
        log.info("decode steps take torch's operations: %s", reason)
        return None
    try:
        folder = cache_folder()
        _check_writable(folder)
    except (OSError, RuntimeError) as error:  # without a home Path raises the second
        log.warning("decode steps take torch's operations: no folder for compiled kernels: %s", error)
        return None
    try:
        with _alone(folder):
            return _compile(folder)
    except Exception as error:  # noqa: BLE001  # a compiler may raise anything, and torch's operations work
        log.warning("decode steps take torch's operations: nothing compiled: %s", error)
        return None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Lets one process after the other in. A process that dies lets go of the lock. Where there can be none, as on some
    file systems, or its holder stands still, each process compiles by itself."""
    with ExitStack() as held:
        with suppress(OSError):
            _wait_for(held.enter_context(folder.with_suffix(".lock").open("w")))
        yield


def _wait_for(lock: IO[str]) -> None:
    until, is_told = time.monotonic() + MAX_WAIT_S, False
    while time.monotonic() < until:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not is_told:
                log.info("another process compiles the kernels of this CPU; its results are waited for")
            is_told = True
            time.sleep(0.1)
        else:
            return


def _compile(folder: Path) -> Compiled:
    import numba

    from kernels.cpu import decoder, product

    numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]  # numba makes its settings at run time
    is_first = not any(folder.iterdir())
    if is_first:
        log.info("compiling the kernels of this CPU, once (%s)", folder, extra={"event": "kernels_compiling"})
    started = time.perf_counter()
    make = numba.cfunc("void(int64)", nopython=True, cache=True)  # type: ignore[call-arg]  # of the decorator's **options
    decode, multiply = make(decoder.decode.py_func), make(product.multiply.py_func)
    assert decode.address is not None and multiply.address is not None, "numba kept no machine code"
    if is_first:
        log.info("compiled the kernels of this CPU in %.1f s", time.perf_counter() - started)
    return Compiled(decode.address, multiply.address, (decode, multiply))


def refusal() -> str:
    """Returns why nothing can be compiled here, in a few words; empty if it can."""
    try:
        from kernels.cpu import emit
    except ImportError as error:
        return f"numba is not installed ({error})"
    if not emit.has_wide_registers():
        return "this CPU has no registers of 512 bits"
    return ""


def cpu_name() -> str:
    """Returns LLVM's name of this CPU."""
    import llvmlite.binding

    return str(llvmlite.binding.get_host_cpu_name())


def cache_folder() -> Path:
    """Returns the cache folder. There is one for each version of this package, because numba compares only the file that
    it compiles, one for each place of it, because numba keeps one file for each path of a source, and one for each kind
    of CPU that is set, because numba does not know which instructions are hidden. So it is empty only if numba will
    compile."""
    here = Path(__file__).parent
    told = (
        b"".join(path.read_bytes() for path in sorted(here.glob("*.py"))) + bytes(here) + instructions.kind().encode()
    )
    digest = hashlib.blake2b(told, digest_size=8)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "headgate" / f"kernels-{digest.hexdigest()}"


def _check_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
