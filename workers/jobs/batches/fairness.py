"""Whose chunk is next: deficit round robin in tokens, over tenants. Pure; the memory is `tenant_turn` in SQL.

In turn each tenant is granted a quantum times its weight; a chunk is taken when its predicted tokens fit what was
granted and not yet used. Rounds in which nobody could take anything are computed, not walked.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from accounting.batches.claims import Waiting

QUANTUM_TOKENS = 4096
CACHED_DISCOUNT = 10
"""A cached token costs a tenth of its turn."""


class Turn(msgspec.Struct, frozen=True):
    tenant_id: str
    deficits: dict[str, int]
    """Of every tenant that waits, after this turn."""
    visits: dict[str, int]
    """Their order: the smallest is visited next."""


def choose(waiting: Sequence[Waiting], max_claimed: int) -> Turn | None:
    """None: nobody may have another chunk now."""
    ready = sorted((w for w in waiting if w.num_claimed < max_claimed), key=lambda w: (w.last_visit, w.tenant_id))
    if not ready:
        return None
    rounds = [_rounds_needed(tenant) for tenant in ready]
    least = min(rounds)
    first = rounds.index(least)
    deficits = {w.tenant_id: w.deficit_tokens for w in waiting}
    visits = {w.tenant_id: w.last_visit for w in waiting}
    if least:  # else somebody has not used up its last grant, and nobody is visited
        last = max(visits.values())
        for place, tenant in enumerate(ready):
            # In order: up to the chosen one all were visited `least` times, those behind it once less.
            deficits[tenant.tenant_id] += (least if place <= first else least - 1) * _grant(tenant)
            if place <= first:
                visits[tenant.tenant_id] = last + 1 + place
    chosen = ready[first]
    deficits[chosen.tenant_id] -= chosen.predicted_tokens
    return Turn(chosen.tenant_id, deficits, visits)


def cost(cached: int, computed: int) -> int:
    """What a finished chunk took of its tenant's turn."""
    return cached // CACHED_DISCOUNT + computed


def _grant(tenant: Waiting) -> int:
    return max(1, QUANTUM_TOKENS * tenant.weight_percent // 100)


def _rounds_needed(tenant: Waiting) -> int:
    missing = tenant.predicted_tokens - tenant.deficit_tokens
    return max(0, -(-missing // _grant(tenant)))
