"""Reads the figures of the queues from the scheduler. The module is pure and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from workers.engine.scheduling.scheduler import Scheduler
from workers.engine.sequences.sequence import Attempt, Status
from workers.engine.values.queue_figures import QueueFigures
from workers.protocol.messages import Tier


def queue_figures(attempts: Iterable[Attempt], scheduler: Scheduler, now: float) -> QueueFigures:
    """Returns the present figures. O(attempts)."""
    found, waiting, tenants = QueueFigures(), dict[Tier, set[str]](), set[str]()
    for attempt in attempts:
        message = attempt.message
        tenants.add(message.tenant)
        if attempt.sequences[0].status is Status.WAITING:
            waiting.setdefault(message.tier, set()).add(message.tenant)
            tier = found.tiers[message.tier]
            tier.oldest_wait_s = max(tier.oldest_wait_s, now - attempt.arrived_at)
    ranks = scheduler.ranks
    for name, tier in found.tiers.items():
        tier.num_running = len(ranks.running[name])
        tier.num_waiting = len(ranks.waiting[name]) + len(ranks.preempted[name])
        tier.num_preempted = dict(ranks.num_preempted[name])
        tier.num_tenants_waiting = len(waiting.get(name, ()))
    found.num_tenants = len(tenants)
    counters = [scheduler.counters[tenant] for tenant in set[str]().union(*waiting.values())]
    found.counter_spread = max(counters) - min(counters) if counters else 0.0
    return found
