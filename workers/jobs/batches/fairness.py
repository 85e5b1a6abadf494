"""The choice of the tenant whose chunk is next: deficit round robin in tokens, over tenants. The module is pure; the
memory is `tenant_turn` in SQL.

In turn each tenant is granted a quantum times its weight. A chunk is taken when its predicted tokens fit into what was
granted and not yet used. Rounds in which no tenant could take a chunk are computed, not iterated.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from accounting.batches.claims import Waiting

QUANTUM_TOKENS = 4096
CACHED_DISCOUNT = 10
"""The divisor for cached tokens: each costs a tenth of a computed one."""


class Turn(msgspec.Struct, frozen=True):
    tenant_id: str
    deficits: dict[str, int]
    """The deficit of every tenant that waits, after this turn."""
    visits: dict[str, int]
    """The order of visits: the tenant with the smallest value is visited next."""


def choose(waiting: Sequence[Waiting], max_claimed: int) -> Turn | None:
    """Returns the next turn, or None if no tenant may have another chunk now."""
    ready = sorted((w for w in waiting if w.num_claimed < max_claimed), key=lambda w: (w.last_visit, w.tenant_id))
    if not ready:
        return None
    rounds = [_rounds_needed(tenant) for tenant in ready]
    least = min(rounds)
    first = rounds.index(least)
    deficits = {w.tenant_id: w.deficit_tokens for w in waiting}
    visits = {w.tenant_id: w.last_visit for w in waiting}
    if least:  # else a tenant has not used up its last grant, and none is visited
        last = max(visits.values())
        for place, tenant in enumerate(ready):
            # In this order all tenants up to the chosen one were visited `least` times, and those after it once less.
            deficits[tenant.tenant_id] += (least if place <= first else least - 1) * _grant(tenant)
            if place <= first:
                visits[tenant.tenant_id] = last + 1 + place
    chosen = ready[first]
    deficits[chosen.tenant_id] -= chosen.predicted_tokens
    return Turn(chosen.tenant_id, deficits, visits)


def cost(cached: int, computed: int) -> int:
    """Returns the tokens that a finished chunk costs its tenant: a cached token costs a tenth."""
    return cached // CACHED_DISCOUNT + computed


def _grant(tenant: Waiting) -> int:
    return max(1, QUANTUM_TOKENS * tenant.weight_percent // 100)


def _rounds_needed(tenant: Waiting) -> int:
    missing = tenant.predicted_tokens - tenant.deficit_tokens
    return max(0, -(-missing // _grant(tenant)))
