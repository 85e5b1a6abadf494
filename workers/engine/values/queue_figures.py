"""Figures of the queues: who waits, for how long, how far tenants are apart, and what steps cost. It holds values only.

They show whether scheduling is fair. Metrics read the sums, because they do not carry every tenant; gateways are told
of each tenant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from workers.protocol.messages import Tier
from workers.protocol.reports import StepTimes

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
class TenantQueue:
    weight: float = 1.0
    num_running: int = 0
    """Number of requests that have begun."""
    num_waiting: int = 0
    """Number of requests that never ran."""
    oldest_wait_s: float = 0.0


@dataclass(slots=True)
class QueueFigures:
    tiers: dict[Tier, TierFigures] = field(
        default_factory=lambda: {"interactive": TierFigures(), "batch": TierFigures()}
    )
    counter_spread: float = 0.0
    """Largest difference between the virtual counters of tenants that wait, in weighted tokens."""
    tenants: dict[str, TenantQueue] = field(default_factory=dict)
    """The tenants that have a request in the worker."""
    wait_s: float = 0.0
    """Forecast of the waiting time of a request that comes now."""
    step_times: StepTimes = field(default_factory=StepTimes)
