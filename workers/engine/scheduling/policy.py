"""Interface of a scheduling policy: the parts of the scheduler that look at tenants. The choice is made once, when a
scheduler is built."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from workers.engine.queueing.fairness import VirtualCounters
from workers.engine.queueing.overload import Overload
from workers.engine.queueing.waiting import Look, Waiting, WaitingQueue
from workers.engine.scheduling.admission import Admission
from workers.engine.scheduling.chunks import Chunks
from workers.engine.scheduling.growth import Growth


class Policy(NamedTuple):
    queue: Callable[[VirtualCounters, Look, Callable[[], int]], Waiting]
    admission: type[Admission]
    chunks: type[Chunks]
    growth: type[Growth]
    overload: type[Overload]


FAIR = Policy(WaitingQueue, Admission, Chunks, Growth, Overload)
"""Tenants get fair shares."""
