"""Objects of `/admin/v1/fairness`, and the share of each tenant. The module is pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from accounting.ledger.rollups import TenantSums
from accounting.requests.request_log_figures import Queued, Refused
from accounting.values.types import Usage
from workers.protocol.reports import TenantReport

COMPUTED_COST, CACHED_COST, OUTPUT_COST = 1.0, 0.1, 2.0
"""The amounts that workers charge a tenant's counter for a token. A test compares the numbers with the scheduler's."""


class Present(NamedTuple):
    """The requests of a tenant in workers now."""

    running: int = 0
    waiting: int = 0
    oldest_wait_ms: int = 0

    def and_also(self, one: TenantReport) -> Present:
        return Present(
            self.running + one.running, self.waiting + one.waiting, max(self.oldest_wait_ms, one.oldest_wait_ms)
        )


def shares(
    used: Sequence[TenantSums],
    weights: Mapping[str, float],
    queued: Mapping[str, Queued],
    present: Mapping[str, Present],
) -> list[dict[str, Any]]:
    """Returns the tenants that were served or are present. The promise to each is its part of all their weights; who
    asks for less than that receives less, and others have the rest."""
    service = {one.tenant_id: _service(one.usage) for one in used}
    tenant_ids = [*service, *sorted(present.keys() - service.keys())]
    all_service = sum(service.values()) or 1.0
    all_weights = sum(weights.get(tenant_id, 1.0) for tenant_id in tenant_ids) or 1.0
    num_requests = {one.tenant_id: one.num_requests for one in used}
    found = []
    for tenant_id in tenant_ids:
        waited, now = queued.get(tenant_id), present.get(tenant_id, Present())
        weight = weights.get(tenant_id, 1.0)
        found.append(
            {
                "project_id": tenant_id,
                "weight": weight,
                "promised_share": weight / all_weights,
                "received_share": service.get(tenant_id, 0.0) / all_service,
                "service_tokens": round(service.get(tenant_id, 0.0)),
                "num_requests": num_requests.get(tenant_id, 0),
                "mean_queue_ms": None if waited is None else round(waited.mean_ms, 3),
                "longest_queue_ms": None if waited is None else round(waited.longest_ms, 3),
                "running": now.running,
                "waiting": now.waiting,
                "oldest_wait_ms": now.oldest_wait_ms,
            }
        )
    return found


def refusal(one: Refused) -> dict[str, Any]:
    return {"project_id": one.tenant_id, "code": one.error_code, "num_requests": one.num_requests}


def _service(usage: Usage) -> float:
    """Returns the tokens as the scheduler weighs them."""
    computed = usage.cache_write + usage.uncached
    return COMPUTED_COST * computed + CACHED_COST * usage.cache_read + OUTPUT_COST * usage.output
