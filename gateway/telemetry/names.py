"""Every name that spans carry. This is the only module with a `gen_ai.` literal (a test looks for others).

GenAI conventions: open-telemetry/semantic-conventions-genai, status *Development*, as of 2026-08; HTTP: 1.40.
"""

from __future__ import annotations

from typing import Final

# GenAI
OPERATION_NAME: Final = "gen_ai.operation.name"
PROVIDER_NAME: Final = "gen_ai.provider.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
REQUEST_STREAM: Final = "gen_ai.request.stream"
MAX_TOKENS: Final = "gen_ai.request.max_tokens"
CHOICE_COUNT: Final = "gen_ai.request.choice.count"
TEMPERATURE: Final = "gen_ai.request.temperature"
TOP_P: Final = "gen_ai.request.top_p"
TOP_K: Final = "gen_ai.request.top_k"
SEED: Final = "gen_ai.request.seed"
FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
RESPONSE_ID: Final = "gen_ai.response.id"
RESPONSE_MODEL: Final = "gen_ai.response.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE_TOKENS: Final = "gen_ai.usage.cache_write.input_tokens"

OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v1/score": "score",
}
"""Route → operation, of requests by POST. Other routes have no model span. The recording rules of ops/prometheus count
errors of the same routes."""
PROVIDER: Final = "headgate"

# General
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
ERROR_TYPE: Final = "error.type"

# Ours
REQUEST_ID: Final = "headgate.request.id"
TENANT_ID: Final = "headgate.tenant.id"
API_KEY_ID: Final = "headgate.api_key.id"
TIER: Final = "headgate.tier"
OUTCOME: Final = "headgate.outcome"
NUM_RETRIES: Final = "headgate.num_retries"
REPLAYED: Final = "headgate.replayed.request.id"
REFUSED_BY: Final = "headgate.limit"
WORKER_ID: Final = "headgate.worker.id"
ROUTER_REASON: Final = "headgate.router.reason"
ROUTER_CACHED: Final = "headgate.router.cached_tokens"
ROUTER_ELSEWHERE: Final = "headgate.router.cached_elsewhere_tokens"
ROUTER_TTFT_S: Final = "headgate.router.ttft_s"
WIRE_S: Final = "headgate.wire_s"
NUM_PROMPTS: Final = "headgate.num_prompts"
HAS_GRAMMAR: Final = "headgate.has_grammar"
BATCH_ID: Final = "headgate.batch.id"
LINE_NO: Final = "headgate.batch.line_no"
QUEUE_WAIT_S: Final = "headgate.queue.wait_s"
CACHED_TOKENS: Final = "headgate.cache.cached_tokens"
PUBLIC_TOKENS: Final = "headgate.cache.public_tokens"
MISS_REASON: Final = "headgate.cache.miss_reason"
DIVERGED_AT: Final = "headgate.cache.diverged_at_token"
PREEMPTIONS: Final = "headgate.preemptions"
RECOMPUTED_TOKENS: Final = "headgate.recomputed_tokens"
SPECULATED_TOKENS: Final = "headgate.speculated_tokens"
LEASE_BOUND: Final = "headgate.lease.bound"
LEASE_RESULT: Final = "headgate.lease.result"
LEASE_RENEWALS: Final = "headgate.lease.renewals"
CHARGE: Final = "headgate.charge.micro_units"
CURRENCY: Final = "headgate.charge.currency"
STEP: Final = "headgate.step"
NUM_TOKENS: Final = "headgate.num_tokens"

# Spans. Those of the worker's phases have the names of `accounting/values/timelines.py`.
ADMIT: Final = "admit"
DISPATCH: Final = "dispatch"
QUEUE: Final = "queue"
PREFILL: Final = "prefill"
SETTLE: Final = "settle"
SHIP: Final = "ship"
