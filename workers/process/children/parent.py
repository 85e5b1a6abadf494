"""A process that ends with the one that started it, even if that one is killed, and even if it is stopped itself.

The kernel sends the signal when the thread ends that started the child, so that thread has to live as long as its
process. The module loads little, because small children call it.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Lets this process get the signal when the process `parent` ends, which started this one, even if that is killed. Ends
    this one if that has happened already.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:
        os._exit(1)
