"""The dashboard of batches and webhooks."""

from __future__ import annotations

from ops.dashboards.panels import Dashboard, Row, panel, quantiles

JOBS = Dashboard(
    "headgate-jobs",
    "Headgate: batches and webhooks",
    (
        Row(
            "Batches",
            (
                panel("Batches by state", "short", ("max by (state) (headgate_batches)", "{{state}}")),
                panel("Open chunks", "short", ("max by (state) (headgate_batch_chunks)", "{{state}}")),
                panel(
                    "Open lines",
                    "short",
                    ('max by (state) (headgate_batch_lines{state=~"queued|claimed"})', "{{state}}"),
                ),
                panel("Oldest queued batch", "s", ("max(headgate_batch_oldest_queued_seconds)", "age")),
                panel(
                    "Lines that ended",
                    "short",
                    (
                        'max by (state) (deriv(headgate_batch_lines{state=~"completed|failed"}[$rate]))',
                        "{{state}} per second",
                    ),
                ),
                panel(
                    "Time until the queue is empty",
                    "s",
                    (
                        'max(sum by (instance) (headgate_batch_lines{state=~"queued|claimed"})) / '
                        'clamp_min(max(sum by (instance) (deriv(headgate_batch_lines{state=~"completed|failed"}[$rate]))), 1e-3)',
                        "at the present pace",
                    ),
                ),
            ),
        ),
        Row(
            "Runners",
            (
                panel(
                    "Lines sent again",
                    "ops",
                    ("sum by (class) (rate(headgate_batch_line_retries_total[$rate]))", "{{class}}"),
                ),
                panel(
                    "Claims",
                    "short",
                    ("sum(increase(headgate_batch_claims_expired_total[$rate]))", "expired"),
                    ("sum(increase(headgate_batch_fence_rejects_total[$rate]))", "lost before a write"),
                ),
                panel(
                    "Lines given up",
                    "short",
                    ("sum(increase(headgate_batch_lines_quarantined_total[$rate]))", "lines"),
                    text="They crashed their runner three times.",
                ),
                panel(
                    "Last message received",
                    "s",
                    ("max by (instance) (headgate_jobs_last_consume_age_seconds)", "{{instance}}"),
                ),
                panel(
                    "Webhook deliveries",
                    "ops",
                    ("sum by (outcome) (rate(headgate_webhook_deliveries_total[$rate]))", "{{outcome}}"),
                ),
            ),
        ),
        Row(
            "Batch beside chats",
            (
                panel(
                    "Share of batch in the computed tokens",
                    "percentunit",
                    (
                        'sum(rate(headgate_step_tokens_total{tier="batch"}[$rate])) / '
                        "sum(rate(headgate_step_tokens_total[$rate]))",
                        "batch",
                    ),
                ),
                quantiles("Time to the first token of chats", "gen_ai_server_time_to_first_token_seconds"),
            ),
        ),
    ),
)
