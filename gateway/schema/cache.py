"""Objects of `/admin/v1/cache`. The module holds shapes only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accounting.billing.residency_sums import TenantKept
from accounting.ledger.rollups import TenantSums
from gateway.schema.workers import cache
from workers.protocol.registry import Registration
from workers.protocol.reports import EngineReport


def tenant(used: TenantSums, kept: TenantKept | None, blocks: Mapping[str, int]) -> dict[str, Any]:
    """Returns a tenant's hits and what was kept for it. Blocks are those of now, over all linked workers."""
    kept = kept or TenantKept(0, 0, {})
    usage = used.usage
    return {
        "project_id": used.tenant_id,
        "num_requests": used.num_requests,
        "prompt_tokens": usage.prompt,
        "cached_tokens": usage.cache_read,
        "cached_share": usage.cache_read / usage.prompt if usage.prompt else None,
        "kept_byte_hours": kept.cache,
        "pinned_byte_hours": kept.pinned,
        "charges": [
            {"charge_micro_units": amount, "currency": currency} for currency, amount in sorted(kept.charges.items())
        ],
        "blocks": blocks.get("blocks", 0),
        "pinned_blocks": blocks.get("pinned", 0),
        "evicted_blocks": blocks.get("evicted", 0),
    }


def worker(registration: Registration, report: EngineReport) -> dict[str, Any]:
    return {
        "id": registration.worker,
        "model": registration.model,
        "pinned_blocks": report.pinned_blocks,
        **cache(report),
    }
