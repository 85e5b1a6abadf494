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
REQUEST_PREFIX: Final = "gen_ai.request."
REQUEST_PARAMS: Final = frozenset(
    {"max_tokens", "temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty", "choice.count"}
)
"""The names that may follow `REQUEST_PREFIX`: numbers only, never text of the client's."""
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
    "/v1/embeddings": "embeddings",
}
"""Route → operation. Other routes have no model span."""
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
WORKER_ID: Final = "headgate.worker.id"
ATTEMPT: Final = "headgate.attempt"
BATCH_ID: Final = "headgate.batch.id"
QUEUE_WAIT_S: Final = "headgate.queue.wait_s"
PREEMPTIONS: Final = "headgate.preemptions"
CHARGE: Final = "headgate.charge.micro_units"
STEP: Final = "headgate.step"
NUM_TOKENS: Final = "headgate.num_tokens"

# Spans
ADMIT: Final = "admit"
QUEUE: Final = "queue"
PREFILL: Final = "prefill"
DECODE: Final = "decode"
SETTLE: Final = "settle"
