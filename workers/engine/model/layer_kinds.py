"""A table of families: the names of the parts of their decoder layers in transformers, and how they differ.

Knows transformers' classes. Computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import GELUTanh, SiLUActivation
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer


@dataclass(frozen=True, slots=True)
class LayerKind:
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    """The norms of what attention and the gated products take."""
    added_norms: tuple[str, str] | None = None
    """The norms of what the two add to the residual stream, if it is normed."""
    norms_heads: bool = False
    """Queries and keys are normed."""
    plus_one: bool = False
    """A norm multiplies by 1 + weight."""
    turns_by_type: bool = False
    """Angles depend on the layer's type of attention."""


PLAIN = LayerKind()
PLAIN_KINDS: Mapping[type[nn.Module], LayerKind] = {
    LlamaDecoderLayer: PLAIN,
    MistralDecoderLayer: PLAIN,
    Qwen2DecoderLayer: PLAIN,
    Qwen3DecoderLayer: LayerKind(norms_heads=True),
}
"""The Llama family."""

_FEED_NORMS = ("input_layernorm", "pre_feedforward_layernorm")
_ADDED_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
MORE_KINDS: Mapping[type[nn.Module], LayerKind] = {
    Phi3DecoderLayer: LayerKind(qkv=("qkv_proj",), gate_up=("gate_up_proj",)),
    GemmaDecoderLayer: LayerKind(plus_one=True),
    Gemma2DecoderLayer: LayerKind(norms=_FEED_NORMS, added_norms=_ADDED_NORMS, plus_one=True),
    Gemma3DecoderLayer: LayerKind(
        norms=_FEED_NORMS, added_norms=_ADDED_NORMS, norms_heads=True, plus_one=True, turns_by_type=True
    ),
}
"""Families whose layers are replaced only where they are compiled."""

Gate = Callable[[torch.Tensor], torch.Tensor]
GELU: Gate = partial(F.gelu, approximate="tanh")
_GATES: Mapping[type[nn.Module], Gate] = {SiLUActivation: F.silu, nn.SiLU: F.silu, GELUTanh: GELU}


def is_compiled(model_type: str) -> bool:
    """Returns whether layers of this type of model are compiled where a CPU's instructions allow it."""
    types = {kind.__module__.split(".")[2] for kind in (*PLAIN_KINDS, *MORE_KINDS)}
    return model_type.removesuffix("_text") in types


def gate_of(mlp: nn.Module) -> Gate | None:
    """Returns the function of a gated product; None if it is another one."""
    found: object = getattr(mlp, "act_fn", None) or getattr(mlp, "activation_fn", None)
    return _GATES.get(type(found)) if isinstance(found, nn.Module) else None


def norm_weight(norm: nn.Module, plus_one: bool) -> torch.Tensor:
    """Returns what a norm multiplies by, in float32."""
    weight: torch.Tensor = norm.get_parameter("weight").detach().float()
    return weight + 1.0 if plus_one else weight


def norm_eps(norm: nn.Module) -> float:
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    assert isinstance(eps, float)
    return eps
