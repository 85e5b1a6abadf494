"""Models that take images as well as text, served as the text model inside them.

A wrapper's configuration holds that of its text model. Positions of several axes (Qwen-VL) are equal on all axes where a
prompt has text alone, so such a text model is its plain counterpart. No image can be sent: the gateway refuses it.
"""

from __future__ import annotations

from typing import Any

import transformers
from transformers import PreTrainedConfig

from workers.engine.checkpoint.checkpoint import Checkpoint, read_json

PLAIN: dict[str, type[PreTrainedConfig]] = {
    "qwen2_vl_text": transformers.Qwen2Config,
    "qwen2_5_vl_text": transformers.Qwen2Config,
    "qwen3_vl_text": transformers.Qwen3Config,
    "qwen3_vl_moe_text": transformers.Qwen3MoeConfig,
}
"""The counterpart of a text model with positions of several axes, by its model type."""
WRAPPERS = frozenset({"gemma3", "mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"})
_SEVERAL_AXES = ("mrope_section", "mrope_interleaved")


def text_of(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the configuration of the text model, with the wrapper's end tokens and tied weights. A configuration that
    is none of a known wrapper is returned as it is.
    """
    if config.model_type not in WRAPPERS:
        return config
    text = _plain(config.get_text_config())
    text.tie_word_embeddings = config.tie_word_embeddings
    if getattr(config, "eos_token_id", None) is not None:
        text.eos_token_id = config.eos_token_id
    text.dtype = text.dtype or config.dtype
    if not hasattr(text, "quantization_config") and hasattr(config, "quantization_config"):
        text.quantization_config = config.quantization_config
    return text


def wraps(checkpoint: Checkpoint) -> bool:
    """Says whether a checkpoint has tensors of other parts than the text model."""
    return read_json(checkpoint.directory / "config.json").get("model_type") in WRAPPERS


def _plain(text: PreTrainedConfig) -> PreTrainedConfig:
    kind = PLAIN.get(text.model_type)
    if kind is None:
        return text
    fields: dict[str, Any] = {name: value for name, value in text.to_dict().items() if name not in _NOT_TAKEN}
    rope = fields.get("rope_parameters") or {}
    fields["rope_parameters"] = {name: value for name, value in rope.items() if name not in _SEVERAL_AXES}
    return kind(**fields)


_NOT_TAKEN = frozenset({"model_type", "architectures", "transformers_version"})
