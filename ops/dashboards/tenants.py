"""The dashboard of tenants: what they use, what stops them, and whether the books are in order."""

from __future__ import annotations

from ops.dashboards.panels import Dashboard, Row, panel

TENANTS = Dashboard(
    "headgate-tenants",
    "Headgate: tenants and billing",
    (
        Row(
            "Use",
            (
                panel(
                    "Tokens by tenant",
                    "short",
                    ('sum by (tenant) (rate(headgate_tokens_total{tenant=~"$tenant"}[$rate]))', "{{tenant}}"),
                    text="The first 100 tenants of a gateway have a series each; all others share `_other`.",
                ),
                panel(
                    "Tokens by kind",
                    "short",
                    ('sum by (kind) (rate(headgate_tokens_total{tenant=~"$tenant"}[$rate]))', "{{kind}}"),
                ),
                panel(
                    "Cached share of the prompt",
                    "percentunit",
                    (
                        'sum by (tenant) (rate(headgate_tokens_total{tenant=~"$tenant", kind="cache_read"}[$rate])) / '
                        'sum by (tenant) (rate(headgate_tokens_total{tenant=~"$tenant", kind!="output"}[$rate]))',
                        "{{tenant}}",
                    ),
                ),
                panel(
                    "Charges per hour",
                    "short",
                    (
                        'sum by (tenant, currency) (rate(headgate_charge_micro_units_total{tenant=~"$tenant"}[$rate]))'
                        " * 3600 / 1e6",
                        "{{tenant}} {{currency}}",
                    ),
                ),
                panel(
                    "Left of the tightest budget",
                    "percentunit",
                    ('min by (tenant) (headgate_budget_remaining_ratio{tenant=~"$tenant"})', "{{tenant}}"),
                ),
            ),
        ),
        Row(
            "Limits and leases",
            (
                panel(
                    "Refusals",
                    "reqps",
                    ('sum by (reason) (rate(headgate_admission_total{decision="refused"}[$rate]))', "{{reason}}"),
                ),
                panel(
                    "Would be refused by limits in shadow mode",
                    "reqps",
                    (
                        "sum by (level, dimension) (rate(headgate_shadow_refusals_total[$rate])) or vector(0)",
                        "{{level}} {{dimension}}",
                    ),
                ),
                panel(
                    "Lease extensions",
                    "ops",
                    ("sum by (result) (rate(headgate_lease_renewals_total[$rate]))", "{{result}}"),
                ),
                panel(
                    "Streams ended by a budget",
                    "short",
                    ("sum(increase(headgate_budget_stops_total[$rate]))", "streams"),
                ),
                panel(
                    "Limiter",
                    "short",
                    ("min(headgate_limiter_up)", "up"),
                    ("sum(headgate_limiter_owed_endings)", "endings that Redis has not confirmed"),
                    ("sum(increase(headgate_redis_epoch_rebuilds_total[$rate]))", "states built again"),
                ),
            ),
        ),
        Row(
            "Books",
            (
                panel(
                    "Tokens written off",
                    "short",
                    ("max by (reason) (increase(headgate_writeoff_tokens_total[$rate]))", "{{reason}}"),
                    text="Counted two minutes after their ending. Every gateway counts those of all.",
                ),
                panel(
                    "Tenants with much written off",
                    "none",
                    ("max(headgate_writeoff_tenants)", "more than 1 % of their tokens"),
                    text="Of this hour and the one before. The Books screen names them.",
                ),
                panel("Books in order", "none", ("min by (gateway) (headgate_books_ok)", "gateway {{gateway}}")),
            ),
        ),
    ),
    ("tenant",),
)
