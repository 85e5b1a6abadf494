"""The dashboard of upstreams: servers of others that answer for models."""

from __future__ import annotations

from ops.dashboards.panels import Dashboard, Row, panel

UPSTREAMS = Dashboard(
    "headgate-upstreams",
    "Headgate: upstreams",
    (
        Row(
            "Answers",
            (
                panel(
                    "Attempts by their end",
                    "reqps",
                    ("sum by (upstream, end) (rate(headgate_upstream_attempts_total[$rate]))", "{{upstream}} {{end}}"),
                    text="delivered and cut are answers; every other end is a failure.",
                ),
                panel(
                    "Breakers",
                    "none",
                    ("max by (upstream) (headgate_upstream_breaker)", "{{upstream}}"),
                    text="0 is closed, 1 half open, 2 open: nothing is sent there.",
                ),
                panel("Requests under way", "short", ("sum by (upstream) (headgate_upstream_running)", "{{upstream}}")),
                panel(
                    "Time to the first token",
                    "s",
                    ("max by (upstream) (headgate_upstream_first_token_seconds)", "{{upstream}}"),
                    text="A moving average. Overflow goes elsewhere while it is above the promised time.",
                ),
                panel(
                    "Overflow of our own models",
                    "reqps",
                    ("sum(rate(headgate_overflow_requests_total[$rate])) or vector(0)", "answered by upstreams"),
                ),
            ),
        ),
        Row(
            "Cost and truth",
            (
                panel(
                    "Expected cost per hour",
                    "short",
                    (
                        "sum by (upstream) (rate(headgate_upstream_expected_cost_micro_units_total[$rate])) * 3600 / 1e6",
                        "{{upstream}}",
                    ),
                    text="What the providers should charge by their declared rates, in each one's currency.",
                ),
                panel(
                    "Tokens that a provider stated and nobody believed",
                    "short",
                    ("sum(increase(headgate_upstream_drift_tokens_total[$rate])) or vector(0)", "tokens"),
                    text="The kinds of drift are explained in docs/upstreams.md.",
                ),
                panel(
                    "Bills beyond the expected, 31 days",
                    "short",
                    (
                        "max by (upstream, account) (headgate_upstream_cost_drift_micro_units) / 1e6 != 0",
                        "{{upstream}} {{account}}",
                    ),
                    text="By account, in the currency of the default price sheet. The accounts are explained in docs/upstreams.md.",
                ),
                panel(
                    "Age of the costs that were read",
                    "s",
                    (
                        "time() - max by (upstream) (headgate_upstream_costs_pulled_timestamp_seconds > 0)",
                        "{{upstream}}",
                    ),
                    text="They are read every hour.",
                ),
            ),
        ),
    ),
)
