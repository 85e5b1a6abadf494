"""How long a thread of torch looks for work before it sleeps.

It knows the variables of libgomp, the OpenMP library of torch. It does not know what the threads compute.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

_COUNT, _POLICY = "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"
_LOOKS = "10000"
"""Looks of a thread, some 0.2 to 0.5 ms: longer than the gap between two operations of a step. libgomp's own number is
300,000, which is up to 17 ms. Where another process has a core, a thread then looks for longer than a turn of the
system's scheduler, at the cost of the very thread that it waits for."""


def bound(environment: MutableMapping[str, str] = os.environ) -> None:
    """Bounds the looks of this process's threads. It has to be called before torch is imported. A user's own setting
    remains."""
    if _COUNT not in environment and _POLICY not in environment:
        environment[_COUNT] = _LOOKS
