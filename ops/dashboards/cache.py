"""The dashboard of the prefix cache."""

from __future__ import annotations

from ops.dashboards.panels import Dashboard, Row, heatmap, panel

NAMED = '{model_name=~"$model_name"}'

CACHE = Dashboard(
    "headgate-cache",
    "Headgate: prefix cache",
    (
        Row(
            "Hits",
            (
                panel(
                    "Cached share of prompt tokens",
                    "percentunit",
                    (
                        f"sum by (model_name) (rate(vllm:prefix_cache_hits_total{NAMED}[$rate])) / "
                        f"sum by (model_name) (rate(vllm:prefix_cache_queries_total{NAMED}[$rate]))",
                        "{{model_name}}",
                    ),
                ),
                panel(
                    "Cached tokens by region",
                    "short",
                    ("sum by (region) (rate(headgate_cached_tokens_total[$rate]))", "{{region}}"),
                ),
                panel(
                    "Why no more was cached",
                    "reqps",
                    ("sum by (reason) (rate(headgate_cache_misses_total[$rate]))", "{{reason}}"),
                ),
                panel(
                    "Match time",
                    "s",
                    (
                        "sum(rate(headgate_cache_match_seconds_sum[$rate])) / sum(rate(headgate_cache_match_seconds_count[$rate]))",
                        "mean",
                    ),
                ),
                panel(
                    "Router: predicted and real",
                    "short",
                    ("sum by (kind) (rate(headgate_router_cached_tokens_total[$rate]))", "{{kind}} tokens per second"),
                    ("sum(rate(headgate_router_other_worker_misses_total[$rate]))", "prompts that another worker had"),
                ),
            ),
        ),
        Row(
            "Blocks",
            (
                panel(
                    "Blocks by state",
                    "short",
                    ("sum by (state) (headgate_cache_blocks)", "{{state}}"),
                    ("sum(headgate_cache_pinned_blocks)", "pinned"),
                ),
                panel("Nodes of the tree", "short", ("headgate_cache_nodes", "{{instance}}")),
                panel(
                    "Evicted blocks",
                    "short",
                    ("sum by (reason) (rate(headgate_cache_evicted_blocks_total[$rate]))", "{{reason}}"),
                ),
                heatmap("Age of evicted blocks", "s", "vllm:kv_block_lifetime_seconds", where=NAMED),
                heatmap("Idle time before the eviction", "s", "vllm:kv_block_idle_before_evict_seconds", where=NAMED),
                heatmap(
                    "Time between two uses",
                    "s",
                    "vllm:kv_block_reuse_gap_seconds",
                    where=NAMED,
                    text="Longer gaps than blocks stay idle before their eviction ask for a larger pool.",
                ),
                panel(
                    "Quotas, floors and laws",
                    "short",
                    ("sum(increase(headgate_cache_refused_inserts_total[$rate]))", "commits cut short by a quota"),
                    ("sum(increase(headgate_cache_floor_breaches_total[$rate]))", "leaves cut below a floor"),
                    ("sum(increase(headgate_cache_broken_laws_total[$rate]))", "laws broken"),
                ),
                panel(
                    "Other tiers",
                    "short",
                    ("sum by (tier) (rate(headgate_cache_tier_hit_tokens_total[$rate])) or vector(0)", "{{tier}} hits"),
                    ("sum by (direction) (rate(headgate_swapped_blocks_total[$rate]))", "swapped {{direction}}"),
                ),
            ),
        ),
    ),
    ("model_name",),
)
