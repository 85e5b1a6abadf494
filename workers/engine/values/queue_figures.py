"""Figures of the queues: who waits, for how long, and how far tenants are apart. Values only.

They show whether scheduling is fair. They name no tenant, because a worker's metrics do not carry every tenant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from workers.protocol.messages import Tier

Cause = Literal["blocks", "tier", "lease", "memory"]
"""Why a sequence lost its blocks: a sequence that runs needed them, an interactive request waited for a batch sequence's
place, it was parked at the bound of its lease for too long, or its step did not fit the device's memory."""
CAUSES: tuple[Cause, ...] = get_args(Cause)


@dataclass(slots=True)
class TierFigures:
    num_running: int = 0
    """Number of sequences that hold blocks."""
    num_waiting: int = 0
    """Number of sequences that wait for blocks or a place."""
    num_preempted: dict[Cause, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    """Number of preemptions since the process began, by cause."""
    num_tenants_waiting: int = 0
    """Number of tenants with a request that never ran."""
    oldest_wait_s: float = 0.0
    """Seconds for which the oldest of these requests has been waiting."""


@dataclass(slots=True)
class QueueFigures:
    tiers: dict[Tier, TierFigures] = field(
        default_factory=lambda: {"interactive": TierFigures(), "batch": TierFigures()}
    )
    num_tenants: int = 0
    """Number of tenants that have a request in the worker."""
    counter_spread: float = 0.0
    """Largest difference between the virtual counters of tenants that wait, in weighted tokens."""
