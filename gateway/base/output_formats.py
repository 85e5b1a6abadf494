"""The names of the formats in which models write tool calls and reasoning. `gateway/parsers/dialects.py` reads them."""

from __future__ import annotations

TOOL_FORMATS = (
    "hermes",
    "qwen3_coder",
    "glm",
    "seed_oss",
    "longcat",
    "llama",
    "pythonic",
    "mistral",
    "mistral_named",
    "deepseek",
    "deepseek_v31",
    "deepseek_v32",
    "minimax_m2",
    "kimi",
    "granite",
    "cohere",
    "command_r",
    "functiongemma",
    "gemma4",
    "internlm",
    "jamba",
    "nemotron",
    "functools",
    "lfm2",
    "olmo3",
    "harmony",
)
REASONING_FORMATS = ("none", "think", "brackets", "seed", "cohere", "longcat", "phrases")
