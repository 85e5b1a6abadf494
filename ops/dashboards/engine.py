"""The dashboards of the workers: what an engine does, and whether it is fair."""

from __future__ import annotations

from ops.dashboards.panels import Dashboard, Row, heatmap, panel, quantiles

NAMED = '{model_name=~"$model_name"}'

ENGINE = Dashboard(
    "headgate-engine",
    "Headgate: engine and GPU",
    (
        Row(
            "Load",
            (
                panel(
                    "Sequences",
                    "short",
                    (f"sum by (model_name) (vllm:num_requests_running{NAMED})", "{{model_name}} running"),
                    (f"sum by (model_name) (vllm:num_requests_waiting{NAMED})", "{{model_name}} waiting"),
                ),
                panel("KV in use", "percentunit", (f"vllm:kv_cache_usage_perc{NAMED}", "{{model_name}} {{instance}}")),
                panel(
                    "Tokens",
                    "short",
                    (
                        f"sum by (model_name) (rate(vllm:prompt_tokens_total{NAMED}[$rate]))",
                        "{{model_name}} prompt per second",
                    ),
                    (
                        f"sum by (model_name) (rate(vllm:generation_tokens_total{NAMED}[$rate]))",
                        "{{model_name}} output per second",
                    ),
                ),
                panel(
                    "Attempts by ending",
                    "reqps",
                    (
                        f"sum by (finished_reason) (rate(vllm:request_success_total{NAMED}[$rate]))",
                        "{{finished_reason}}",
                    ),
                ),
                quantiles("Time to the first token, in the worker", "vllm:time_to_first_token_seconds", where=NAMED),
                quantiles("Between two tokens", "vllm:inter_token_latency_seconds", where=NAMED),
                quantiles("Queue", "vllm:request_queue_time_seconds", where=NAMED),
                quantiles("Prefill", "vllm:request_prefill_time_seconds", where=NAMED),
                quantiles("Decode", "vllm:request_decode_time_seconds", where=NAMED),
            ),
        ),
        Row(
            "Steps",
            (
                panel(
                    "Mean time of a step",
                    "s",
                    (
                        "sum by (phase) (rate(headgate_step_seconds_sum[$rate])) / sum by (phase) (rate(headgate_step_seconds_count[$rate]))",
                        "{{phase}}",
                    ),
                    text="`idle` is what the device waited for the plan of a step.",
                ),
                panel(
                    "Computed tokens by phase",
                    "short",
                    ("sum by (phase) (rate(headgate_step_tokens_total[$rate]))", "{{phase}} per second"),
                ),
                heatmap("Tokens of a step", "short", "vllm:iteration_tokens_total", where=NAMED),
                panel(
                    "Preemptions by cause",
                    "ops",
                    ("sum by (cause) (rate(headgate_preemptions_total[$rate]))", "{{cause}}"),
                    text="For a sequence that grows (blocks), for a chat (tier), at the bound of a lease, or in a step too large"
                    " for the device (memory).",
                ),
                panel(
                    "Computed in vain",
                    "short",
                    ("sum(rate(headgate_recomputed_tokens_total[$rate]))", "again after a preemption"),
                    ("sum(rate(headgate_lag_discarded_tokens_total[$rate]))", "for sequences that had ended"),
                ),
                panel(
                    "Guessed tokens",
                    "short",
                    ("sum(rate(vllm:spec_decode_num_draft_tokens_total[$rate]))", "proposed"),
                    ("sum(rate(vllm:spec_decode_num_accepted_tokens_total[$rate]))", "accepted"),
                ),
            ),
        ),
        Row(
            "Requests and device",
            (
                heatmap("Prompt length", "short", "vllm:request_prompt_tokens", where=NAMED),
                heatmap("Output length", "short", "vllm:request_generation_tokens", where=NAMED),
                panel("Slots in running blocks", "short", ("sum by (kind) (headgate_kv_slots)", "{{kind}}")),
                panel(
                    "Failed steps",
                    "short",
                    ("sum(increase(headgate_out_of_memory_steps_total[$rate]))", "steps out of memory"),
                    ("sum(increase(headgate_poisoned_attempts_total[$rate]))", "requests that made one fail"),
                ),
                panel("Kernels", "none", ("headgate_kernel_info", "{{op}} {{implementation}} {{state}}"), kind="table"),
                panel(
                    "Size of the pool",
                    "none",
                    ("vllm:cache_config_info", "{{num_gpu_blocks}} blocks of {{block_size}}"),
                    kind="table",
                ),
            ),
        ),
    ),
    ("model_name",),
)

FAIRNESS = Dashboard(
    "headgate-fairness",
    "Headgate: fairness",
    (
        Row(
            "Tenants",
            (
                panel(
                    "Tenants in a worker",
                    "short",
                    ("max by (instance) (headgate_active_tenants)", "{{instance}} with a request"),
                    ("max by (instance, tier) (headgate_waiting_tenants)", "{{instance}} waiting, {{tier}}"),
                ),
                panel(
                    "Spread of the counters",
                    "short",
                    ("max by (instance) (headgate_tenant_counter_spread_tokens)", "{{instance}}"),
                    text="Weighted tokens between the tenant that waits with the most service and the one with the least. It stays bounded while"
                    " the scheduler is fair.",
                ),
                panel(
                    "Tokens of the five largest tenants",
                    "short",
                    ("topk(5, sum by (tenant) (rate(headgate_tokens_total[$rate])))", "{{tenant}}"),
                ),
                panel(
                    "Share of the largest tenant",
                    "percentunit",
                    (
                        "max(sum by (tenant) (rate(headgate_tokens_total[$rate]))) / sum(rate(headgate_tokens_total[$rate]))",
                        "share",
                    ),
                ),
            ),
        ),
        Row(
            "Tiers",
            (
                panel(
                    "Oldest request that waits",
                    "s",
                    ("max by (model_name, tier) (headgate_oldest_wait_seconds)", "{{model_name}} {{tier}}"),
                ),
                panel(
                    "Sequences",
                    "short",
                    ("sum by (tier) (headgate_running_sequences)", "{{tier}} running"),
                    ("sum by (tier) (headgate_waiting_sequences)", "{{tier}} waiting"),
                ),
                panel(
                    "Computed tokens",
                    "short",
                    ("sum by (tier) (rate(headgate_step_tokens_total[$rate]))", "{{tier}} per second"),
                ),
                panel("Preemptions", "ops", ("sum by (tier) (rate(headgate_preemptions_total[$rate]))", "{{tier}}")),
                panel(
                    "Work before admission",
                    "short",
                    ("sum(headgate_text_waiting_requests)", "requests that wait for a thread"),
                    ("sum(rate(headgate_body_refusals_total[$rate])) or vector(0)", "bodies refused per second"),
                ),
                quantiles("Queue in the worker", "vllm:request_queue_time_seconds"),
            ),
        ),
    ),
)
