"""Reads the figures of the queues from the scheduler. The module is pure and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from workers.engine.scheduling.scheduler import Scheduler
from workers.engine.sequences.sequence import Attempt, Status
from workers.engine.values.queue_figures import QueueFigures, TenantQueue
from workers.protocol.messages import Tier
from workers.protocol.reports import StepTimes


def queue_figures(attempts: Iterable[Attempt], scheduler: Scheduler, now: float) -> QueueFigures:
    """Returns the present figures. O(attempts)."""
    found, waiting = QueueFigures(wait_s=scheduler.wait_s()), dict[Tier, set[str]]()
    for attempt in attempts:
        message = attempt.message
        tenant = found.tenants.setdefault(message.tenant, TenantQueue(message.weight))
        if attempt.sequences[0].status is Status.WAITING:
            waiting.setdefault(message.tier, set()).add(message.tenant)
            tier, wait_s = found.tiers[message.tier], now - attempt.arrived_at
            tier.oldest_wait_s = max(tier.oldest_wait_s, wait_s)
            tenant.oldest_wait_s = max(tenant.oldest_wait_s, wait_s)
            tenant.num_waiting += 1
        else:
            tenant.num_running += 1
    ranks = scheduler.ranks
    for name, tier in found.tiers.items():
        tier.num_running = len(ranks.running[name])
        tier.num_waiting = len(ranks.waiting[name]) + len(ranks.preempted[name])
        tier.num_preempted = dict(ranks.num_preempted[name])
        tier.num_tenants_waiting = len(waiting.get(name, ()))
    seen = scheduler.budget.step_time
    if seen.num_steps:
        found.step_times = StepTimes(seen.num_steps, *seen.fit)
    counters = [scheduler.counters[tenant] for tenant in set[str]().union(*waiting.values())]
    found.counter_spread = max(counters) - min(counters) if counters else 0.0
    return found
