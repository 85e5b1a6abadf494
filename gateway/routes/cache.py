"""`/admin/v1/cache`: what prefix caches hold, for whom, at what cost, and what it saved. Operator keys only.

Hits and kept KV come from SQL, and so cover all gateways and workers. Blocks and evictions are what linked workers
report. The beginnings of prompts are counted by the gateway that answers, since its start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from accounting.billing import residency_sums
from accounting.ledger import rollups
from gateway.base import errors
from gateway.base.app_keys import SETTINGS
from gateway.generation.stream import GENERATION
from gateway.http.sql import reading
from gateway.routes.admin import now, route
from gateway.routing.links.worker_link import WorkerLink
from gateway.routing.prefix_uses import PrefixUse
from gateway.schema import cache as shapes
from gateway.schema import query
from gateway.schema.organization import reply

MAX_TENANTS = 100
MAX_PREFIXES = 50
MAX_HOURS = 47
"""Readings of kept KV stay for two days."""


async def show(request: web.Request) -> web.Response:
    """Shows the caches of all workers, and what they kept and saved in the last hours (`?hours=`, 24 by default)."""
    query.refuse_unknown(request.query, ("hours",))
    hours = query.integer(request.query, "hours")
    hours = 24 if hours is None else hours
    if not 1 <= hours <= MAX_HOURS:
        raise errors.invalid(f"'hours' must be 1 to {MAX_HOURS}.", "hours")
    end = now()
    start = rollups.bucket_of("1h", end - (hours - 1) * 3600)
    services = request.app[GENERATION]
    links = sorted(services.fleet.links, key=lambda link: link.registration.worker)
    async with reading(request) as conn:
        used = await rollups.by_tenant(conn, "1h", start, limit=MAX_TENANTS)
        tenant_ids = [one.tenant_id for one in used]
        kept = await residency_sums.by_tenant(conn, start, tenant_ids)
    blocks = _blocks(links)
    return reply(
        {
            "object": "cache",
            "gateway": request.app[SETTINGS].slot,
            "start_time": start,
            "end_time": end,
            "tenants": [shapes.tenant(one, kept.get(one.tenant_id), blocks.get(one.tenant_id, {})) for one in used],
            "workers": [shapes.worker(link.registration, link.report) for link in links],
            "prefixes": [_prefix(name, use) for name, use in services.router.prefixes.top(MAX_PREFIXES)],
        }
    )


def _prefix(name: str, use: PrefixUse) -> dict[str, Any]:
    return {
        "hash": name,
        "model": use.model,
        "public": use.is_public,
        "num_requests": use.num_requests,
        "prompt_tokens": use.num_prompt_tokens,
        "cached_tokens": use.num_cached_tokens,
        "cached_share": use.num_cached_tokens / use.num_prompt_tokens if use.num_prompt_tokens else None,
    }


def _blocks(links: Sequence[WorkerLink]) -> dict[str, Counter[str]]:
    """Returns the blocks by tenant, over all workers."""
    found: dict[str, Counter[str]] = {}
    for link in links:
        for one in link.report.tenants:
            found.setdefault(one.tenant, Counter()).update(
                blocks=one.held_blocks + one.retained_blocks, pinned=one.pinned_blocks, evicted=one.evicted_blocks
            )
    return found


ROUTES = [route("GET", "/admin/v1/cache", show)]
