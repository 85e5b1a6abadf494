"""The dashboard of the whole installation: service levels, traffic, gateways."""

from __future__ import annotations

from ops.dashboards.panels import Dashboard, Row, panel, quantiles

MODEL = '{gen_ai_request_model=~"$model"}'

OVERVIEW = Dashboard(
    "headgate-overview",
    "Headgate: overview and service levels",
    (
        Row(
            "Service levels",
            (
                panel(
                    "Error budget burnt, requests",
                    "none",
                    ("headgate:request_errors:ratio_rate5m / 0.001", "5 minutes"),
                    ("headgate:request_errors:ratio_rate1h / 0.001", "1 hour"),
                    ("headgate:request_errors:ratio_rate6h / 0.001", "6 hours"),
                    text="1 uses up exactly the errors that 99.9 % allows. A person is woken above 14.4.",
                ),
                panel(
                    "Error budget burnt, first tokens",
                    "none",
                    ("headgate:slow_first_tokens:ratio_rate5m / 0.01", "5 minutes"),
                    ("headgate:slow_first_tokens:ratio_rate1h / 0.01", "1 hour"),
                    ("headgate:slow_first_tokens:ratio_rate6h / 0.01", "6 hours"),
                    text="99 % of streams have their first token within 2.56 s.",
                ),
                panel(
                    "Error budget burnt, token pace",
                    "none",
                    ("headgate:slow_tokens:ratio_rate5m / 0.01", "5 minutes"),
                    ("headgate:slow_tokens:ratio_rate1h / 0.01", "1 hour"),
                    ("headgate:slow_tokens:ratio_rate6h / 0.01", "6 hours"),
                    text="99 % of streams take at most 0.1 s for a token.",
                ),
                panel(
                    "Books",
                    "none",
                    ("min(headgate_books_ok)", "in order"),
                    kind="stat",
                    text="1 while no equation is broken.",
                ),
                panel("Ready workers", "none", ("max by (model) (headgate_ready_workers)", "{{model}}"), kind="stat"),
                panel("Gateways", "none", ("sum(headgate_gateway_up)", "up"), kind="stat"),
                panel(
                    "Checks",
                    "none",
                    ("max by (check) (headgate_check_state)", "{{check}}"),
                    text="0 is in order, 1 degraded, 2 failing: docs/health.md.",
                ),
            ),
        ),
        Row(
            "Traffic",
            (
                panel(
                    "Requests",
                    "reqps",
                    ('sum by (outcome) (rate(headgate_requests_total{model=~"$model"}[$rate]))', "{{outcome}}"),
                ),
                panel(
                    "Tokens",
                    "short",
                    ('sum by (kind) (rate(headgate_tokens_total{model=~"$model"}[$rate]))', "{{kind}} per second"),
                ),
                panel("Requests under way", "short", ("sum by (tier) (headgate_inflight_requests)", "{{tier}}")),
                quantiles("Duration", "gen_ai_server_request_duration_seconds", where=MODEL),
                quantiles("Time to the first token", "gen_ai_server_time_to_first_token_seconds", where=MODEL),
                quantiles("Time per output token", "gen_ai_server_time_per_output_token_seconds", where=MODEL),
                panel(
                    "Refused requests",
                    "reqps",
                    ('sum by (reason) (rate(headgate_admission_total{decision="refused"}[$rate]))', "{{reason}}"),
                ),
                panel(
                    "Clients that left",
                    "reqps",
                    ("sum by (phase) (rate(headgate_client_disconnects_total[$rate]))", "{{phase}}"),
                ),
                quantiles("Admission", "headgate_admission_wait_seconds", "tier"),
            ),
        ),
        Row(
            "Gateways",
            (
                quantiles("Limiter scripts", "headgate_limiter_script_seconds", "script"),
                quantiles("Journal commits", "headgate_journal_commit_seconds"),
                panel(
                    "Charges on their way to SQL",
                    "s",
                    ("max by (gateway) (headgate_journal_ship_lag_seconds)", "gateway {{gateway}}"),
                    text="How long a durable record has been waiting for SQL.",
                ),
                panel(
                    "Unshipped records",
                    "short",
                    ("sum by (gateway) (headgate_journal_unshipped_records)", "gateway {{gateway}}"),
                ),
                panel(
                    "Journals to look after",
                    "short",
                    ("max(headgate_journals_unreplayed)", "that nobody replays"),
                    ("max(headgate_journal_quarantined_segments)", "damaged segments set aside"),
                ),
                quantiles("Event loop lag", "headgate_event_loop_lag_seconds", "gateway"),
                panel(
                    "Connections to be accepted",
                    "short",
                    ("max(headgate_connections_waiting)", "waiting"),
                    text="Those that clients have opened and no gateway has accepted yet.",
                ),
                panel(
                    "Background work that failed",
                    "short",
                    ("sum by (work) (increase(headgate_background_failures_total[1h]))", "{{work}}"),
                    text="In the last hour, in ways that nobody foresaw.",
                ),
                panel(
                    "Bodies in work",
                    "bytes",
                    ("sum(headgate_body_bytes_held)", "held"),
                    ("sum(headgate_text_waiting_bytes)", "waiting for a thread"),
                ),
                panel(
                    "Router's choices",
                    "reqps",
                    ("sum by (reason) (rate(headgate_router_choices_total[$rate]))", "{{reason}}"),
                ),
                panel(
                    "Workers by state",
                    "short",
                    ("sum by (state) (max by (worker, state) (headgate_worker_state))", "{{state}}"),
                ),
                panel(
                    "Request log",
                    "short",
                    ("sum(rate(headgate_request_log_rows_total[$rate]))", "rows written per second"),
                    ("sum(increase(headgate_request_log_rows_dropped_total[$rate]))", "rows dropped"),
                ),
                panel(
                    "Requests under which workers ended",
                    "short",
                    ("sum(headgate_suspected_requests)", "suspected"),
                    ("sum(headgate_quarantined_requests)", "refused"),
                ),
                panel(
                    "Lost links, what went on, dropped spans",
                    "short",
                    ("sum(increase(headgate_worker_links_lost_total[$rate]))", "links"),
                    ("sum by (outcome) (increase(headgate_request_resumes_total[$rate]))", "requests {{outcome}}"),
                    ("sum(increase(headgate_trace_spans_dropped_total[$rate]))", "spans"),
                ),
            ),
        ),
    ),
    ("model",),
)
