"""Judges by the configuration alone whether a model can be served correctly. Everything else is refused here, with the
reason.

It knows transformers' configurations. It does not read weights; `probe` checks what only a forward pass can show.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any, cast

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from workers.engine.checkpoint import stored
from workers.engine.values.errors import ModelError

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
OTHER_HEADS = (
    "ForMaskedLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
)
"""Endings of architecture names whose checkpoints have no layer that gives the next token."""
COMMON = ("llama", "qwen3", "gemma3", "mistral")
SERVED = (
    *("llama", "mistral", "mistral3", "mixtral", "ministral"),
    *("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl"),
    *("gemma", "gemma2", "gemma3", "phi", "phi3", "phimoe", "granite", "granitemoe", "gpt2", "gpt_neox", "gpt_oss"),
    *("cohere", "ernie4_5", "ernie4_5_moe", "hunyuan_v1_moe", "olmo", "olmo2", "smollm3", "glm4"),
)
"""Model types that a refusal may name."""
_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def refuse_unsupported(config: PreTrainedConfig, *, classifies: bool = False) -> None:
    """Raises ModelError with the first reason why this architecture would not give its own tokens, or its own scores if
    it `classifies`, and with the served one that is nearest by name.
    """
    for reason in _reasons(config, classifies=classifies):
        named = f" ({config.architectures[0]})" if config.architectures else ""
        raise ModelError(
            f"The model type '{config.model_type}'{named} cannot be served: {reason}. {nearest(config.model_type)}"
        )


def nearest(model_type: str) -> str:
    """Returns one sentence that names what is served instead: models of the same family, else the most common."""
    family = re.match(r"[a-z]+", model_type)
    same = [name for name in SERVED if family is not None and name.startswith(family[0]) and name != model_type]
    close = difflib.get_close_matches(model_type, same or SERVED, n=2, cutoff=0.3 if same else 0.75)
    if not close:
        return f"Served are, for example, {', '.join(COMMON)}."
    return f"Nearest to it, {' and '.join(close)} {'is' if len(close) == 1 else 'are'} served."


def _reasons(config: PreTrainedConfig, *, classifies: bool) -> Iterator[str]:
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        yield "it is an encoder-decoder, and only decoders with their own context are served"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        yield "transformers has no causal language model for it"
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", True):
        yield "it is an encoder, whose attention looks ahead"
    heads = [name for name in config.architectures or () if name.endswith(OTHER_HEADS)]
    if heads and not classifies:
        yield f"its head is that of {heads[0]}, which does not continue texts"
    if config.get_text_config() is not config:
        yield "it takes more than text"
    yield from stored.reasons(config)
    if getattr(config, "alibi", False):
        yield "it adds a bias to attention (ALiBi)"
    others = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if others:
        yield f"it has layers of type {', '.join(sorted(others))}"
    # transformers annotates all such mappings as those of its tokenizers.
    kind = cast("type[PreTrainedModel]", MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    if not kind._supports_attention_backend:
        yield "its attention does not go through transformers' attention interface"
    if getattr(config, "num_kv_shared_layers", 0):
        yield "its layers share keys and values"
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        yield "its attention looks ahead"
    for rope in rope_settings(config):
        if "mrope_section" in rope:
            yield "its positions have several axes"


def rope_settings(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Returns the rotary settings, one per layer type if they differ."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def context_limit(config: PreTrainedConfig) -> int:
    """Returns the longest context whose rotary frequencies do not depend on the running length: keys that are already
    cached could not follow a change."""
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if limit is None:
        raise ModelError(f"The model type '{config.model_type}' does not say how long its context is.")
    for rope in rope_settings(config):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            limit = min(limit, rope.get("original_max_position_embeddings", limit))
    return int(limit)
