"""Metric families of the prefix cache (operations.md section 3.2). They are updated each second and at each ending. The
module knows no socket.

Families by tenant exist only where the operator asked for them, because a series per tenant costs the operator memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Metric
from prometheus_client.core import SummaryMetricFamily
from prometheus_client.registry import Collector

from cache.blocks.ages import BOUNDS_S
from cache.blocks.usage import TenantBlocks
from workers.engine.reports.cache_watch import CacheFigures
from workers.engine.reports.families import Families, histogram_family
from workers.engine.sequences.sequence import Attempt
from workers.engine.tiers.tier_figures import TierFigures

MAX_TENANTS = 100
OTHERS = "_other"


class CacheMetrics:
    def __init__(self, families: Families, *, by_tenant: bool) -> None:
        registry = families.registry
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._before = CacheFigures()
        self._ages = _Ages(families.labels)
        registry.register(self._ages)
        self._blocks = gauge("headgate_cache_blocks", "Blocks by their state now.", ["state"])
        self._nodes = gauge("headgate_cache_nodes", "Nodes of the prefix tree.")
        self._evicted = counter(
            "headgate_cache_evicted_blocks", "Blocks that were evicted from the prefix cache.", ["reason"]
        )
        for cause in ("capacity", "quota", "idle"):
            self._evicted.labels(cause)
        self._breaches = counter(
            "headgate_cache_floor_breaches",
            "Leaves of the prefix tree that were evicted although their tenant had no more than its floor.",
        )
        self._refused = counter(
            "headgate_cache_refused_inserts", "Insertions into the prefix cache that were cut short by a quota."
        )
        self._broken = counter(
            "headgate_cache_broken_laws", "Invariants of the prefix cache that were found broken; this must stay 0."
        )
        self._pinned = gauge("headgate_cache_pinned_blocks", "Blocks that are pinned now.")
        self._cached = counter(
            "headgate_cached_tokens", "Prompt tokens that were found in the prefix cache, by region.", ["region"]
        )
        self._misses = counter(
            "headgate_cache_misses", "Attempts whose prompt was not wholly cached, by the reason.", ["reason"]
        )
        self._swapped = counter(
            "headgate_swapped_blocks",
            "Blocks of preempted sequences that were copied to the host, or back to the device.",
            ["direction"],
        )
        self._tiers = _Tiers(registry)
        self._tenants = _Tenants(registry) if by_tenant else None

    def ended(self, attempt: Attempt) -> None:
        report = attempt.report.cache
        self._cached.labels("public").inc(report.public_tokens)
        self._cached.labels("tenant").inc(report.cached_tokens - report.public_tokens)
        if report.miss_reason:
            self._misses.labels(report.miss_reason).inc()

    def observe(self, now: CacheFigures) -> None:
        before, self._before = self._before, now
        self._ages.now = now
        for state, num_blocks in now.blocks.items():
            self._blocks.labels(state).set(num_blocks)
        self._nodes.set(now.num_nodes)
        for cause, num_blocks in now.evicted_blocks.items():
            self._evicted.labels(cause).inc(num_blocks - before.evicted_blocks.get(cause, 0))
        self._breaches.inc(now.num_floor_breaches - before.num_floor_breaches)
        self._refused.inc(now.num_refused_inserts - before.num_refused_inserts)
        self._broken.inc(now.num_broken_laws - before.num_broken_laws)
        self._pinned.set(now.num_pinned_blocks)
        for way, num_blocks in now.num_swapped_blocks.items():
            self._swapped.labels(way).inc(num_blocks - before.num_swapped_blocks.get(way, 0))
        for tier, figures in now.tiers.items():
            self._tiers.observe(tier, figures, before.tiers.get(tier, TierFigures()))
        if self._tenants is not None:
            self._tenants.observe(now.tenants)


AGES = {
    "lifetime": "Age of evicted blocks",
    "idle_before_evict": "Time from the last use of evicted blocks",
    "reuse_gap": "Time for which blocks were unused that were used again",
}


class _Ages(Collector):
    """The times of the cache, shown as they were last read. vLLM's dashboards know the names of the histograms."""

    def __init__(self, labels: dict[str, str]) -> None:
        self.now = CacheFigures()
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        now = self.now
        nothing = (0,) * (len(BOUNDS_S) + 1), 0.0
        for name, text in AGES.items():
            counts, total = now.ages.get(name, nothing)
            yield histogram_family(f"vllm:kv_block_{name}_seconds", text, self._labels, BOUNDS_S, counts, total)
        yield SummaryMetricFamily(
            "headgate_cache_match_seconds",
            "Seconds that it took to find the longest cached prefix of a prompt.",
            count_value=now.num_matches,
            sum_value=now.match_s,
        )


class _Tiers:
    """Metrics of the tiers below the device that exist."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._hits = counter(
            "headgate_cache_tier_hit_tokens",
            "Prompt tokens that were found in a lower cache tier and copied towards the device.",
            ["tier"],
        )
        self._bytes = counter(
            "headgate_cache_tier_bytes",
            "Bytes that were written to a cache tier, or read from it.",
            ["tier", "direction"],
        )
        self._refused = counter(
            "headgate_cache_tier_refused",
            "Blocks that were not written to a cache tier, or not accepted from it, by the reason.",
            ["tier", "reason"],
        )
        self._used = gauge("headgate_cache_tier_used_bytes", "Bytes that are in use now in a cache tier.", ["tier"])

    def observe(self, tier: str, now: TierFigures, before: TierFigures) -> None:
        self._hits.labels(tier).inc(now.num_hit_tokens - before.num_hit_tokens)
        self._bytes.labels(tier, "in").inc(now.num_bytes_in - before.num_bytes_in)
        self._bytes.labels(tier, "out").inc(now.num_bytes_out - before.num_bytes_out)
        for reason, count in now.refused.items():
            self._refused.labels(tier, reason).inc(count - before.refused.get(reason, 0))
        if tier == "host":  # nobody knows the use of a store that many share
            self._used.labels(tier).set(now.num_used_bytes)


class _Tenants:
    """Metrics by tenant. The first tenants seen keep their series until restart, and all later ones share one, so
    counters never fall."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._names: dict[str, str] = {}
        self._before: dict[str, TenantBlocks] = {}
        self._blocks = gauge(
            "headgate_cache_tenant_blocks", "Blocks of a tenant in the prefix cache now.", ["tenant", "state"]
        )
        self._seconds = counter(
            "headgate_cache_block_seconds",
            "Block-seconds that a tenant has occupied in the prefix cache.",
            ["tenant", "state"],
        )
        self._lost = counter(
            "headgate_cache_tenant_evicted_blocks",
            "Blocks that a tenant lost to eviction, and blocks that others lost for it.",
            ["tenant", "side"],
        )

    def observe(self, now: dict[str, TenantBlocks]) -> None:
        others: TenantBlocks | None = None
        for tenant, blocks in now.items():
            if tenant not in self._names and len(self._names) < MAX_TENANTS:
                self._names[tenant] = tenant
            name = self._names.get(tenant, OTHERS)
            self._count(name, blocks, self._before.pop(tenant, TenantBlocks()))
            if not blocks.is_over:
                self._before[tenant] = blocks
            if name == OTHERS:
                others = others or TenantBlocks()
                others.num_held += blocks.num_held
                others.num_retained += blocks.num_retained
            else:
                self._show(name, blocks)
        if others is not None:
            self._show(OTHERS, others)

    def _show(self, name: str, blocks: TenantBlocks) -> None:
        self._blocks.labels(name, "held").set(blocks.num_held)
        self._blocks.labels(name, "retained").set(blocks.num_retained)

    def _count(self, name: str, blocks: TenantBlocks, before: TenantBlocks) -> None:
        held_ms = blocks.held_block_ms - before.held_block_ms
        retained_ms = blocks.retained_block_ms - before.retained_block_ms
        self._seconds.labels(name, "held").inc(held_ms / 1000)
        self._seconds.labels(name, "retained").inc(retained_ms / 1000)
        self._lost.labels(name, "suffered").inc(blocks.num_evicted - before.num_evicted)
        self._lost.labels(name, "caused").inc(blocks.num_evicted_for - before.num_evicted_for)
