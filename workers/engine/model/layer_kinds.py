"""A table of families: the names of the parts of their decoder layers in transformers, and how they differ.

It knows transformers' classes. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer
from transformers.models.phi.modeling_phi import PhiDecoderLayer
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2DecoderLayer

from workers.engine.layers import moe


@dataclass(frozen=True, slots=True)
class BaseParts:
    """Names of the parts of a model around its layers."""

    embed: str = "embed_tokens"
    places: str = ""
    """The embedding of positions; empty if there is none."""
    layers: str = "layers"
    norm: str = "norm"


@dataclass(frozen=True, slots=True)
class LayerKind:
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    by_head: bool = False
    """The one product of `qkv` has a head's query, key and value side by side, instead of all queries first."""
    output: str = "o_proj"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    """A gate and what it is multiplied by, as two products or as one."""
    is_gated: bool = True
    """The gate is multiplied by a second product; otherwise `gate_up` is the gate alone."""
    down: str = "down_proj"
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
    rotates: bool = True
    """Queries and keys are rotated; otherwise embeddings know the positions."""
    may_be_parallel: bool = False
    """The layer may feed both its parts from its input (`is_parallel`)."""
    may_have_experts: bool = False
    """The part behind attention may be a block of experts (`layers.moe`)."""
    base: BaseParts = BaseParts()
    """The model around the layers."""


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
    GPT2Block: LayerKind(
        attention="attn",
        qkv=("c_attn",),
        output="c_proj",
        gate_up=("c_fc",),
        is_gated=False,
        down="c_proj",
        norms=("ln_1", "ln_2"),
        rotates=False,
        base=BaseParts("wte", "wpe", "h", "ln_f"),
    ),
    GPTNeoXLayer: LayerKind(
        attention="attention",
        qkv=("query_key_value",),
        by_head=True,
        output="dense",
        gate_up=("dense_h_to_4h",),
        is_gated=False,
        down="dense_4h_to_h",
        may_be_parallel=True,
        base=BaseParts(embed="embed_in", norm="final_layer_norm"),
    ),
    PhiDecoderLayer: LayerKind(
        output="dense",
        gate_up=("fc1",),
        is_gated=False,
        down="fc2",
        norms=("input_layernorm", "input_layernorm"),
        may_be_parallel=True,
        base=BaseParts(norm="final_layernorm"),
    ),
    MixtralDecoderLayer: LayerKind(may_have_experts=True),
    Qwen3MoeDecoderLayer: LayerKind(norms_heads=True, may_have_experts=True),
    Starcoder2DecoderLayer: LayerKind(gate_up=("c_fc",), is_gated=False, down="c_proj"),
}
"""Families whose layers are replaced only where they are compiled."""

Gate = Callable[[torch.Tensor], torch.Tensor]
GELU: Gate = partial(F.gelu, approximate="tanh")
EXACT_GELU: Gate = F.gelu
_GATES: Mapping[type[nn.Module], Gate] = {
    SiLUActivation: F.silu,
    nn.SiLU: F.silu,
    GELUTanh: GELU,
    NewGELUActivation: GELU,
    GELUActivation: EXACT_GELU,
}
_GATE_NAMES = ("act_fn", "activation_fn", "act")


def is_compiled(config: PreTrainedConfig) -> bool:
    """Returns whether layers of such a model are compiled where a CPU's instructions allow it."""
    types = {kind.__module__.split(".")[2] for kind in (*PLAIN_KINDS, *MORE_KINDS)}
    if config.model_type.removesuffix("_text") not in types or getattr(config, "qk_layernorm", False):
        return False  # configurations of other families may have no sizes of these names, or one for each layer
    hidden = config.hidden_size
    # GPT-2 calls the size of its products n_inner, and takes the usual one without it.
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden
    sizes = (hidden, inner, getattr(config, "moe_intermediate_size", None) or inner)
    return all(size % moe.PANEL == 0 for size in sizes)


def gate_of(mlp: nn.Module) -> Gate | None:
    """Returns the function of a gate; None if it is another one."""
    found = next((getattr(mlp, name) for name in _GATE_NAMES if hasattr(mlp, name)), None)
    return _GATES.get(type(found)) if isinstance(found, nn.Module) else None


def is_parallel(layer: nn.Module, kind: LayerKind) -> bool:
    """Returns whether both parts of a layer take its input. A layer with one norm alone does so in any case."""
    found = getattr(layer, "use_parallel_residual", kind.norms[0] == kind.norms[1])
    return kind.may_be_parallel and bool(found)


def layers_of(model: PreTrainedModel) -> nn.ModuleList | None:
    """Returns the decoder layers of a model, if it has them where one of the families has them."""
    for kind in (*PLAIN_KINDS.values(), *MORE_KINDS.values()):
        found = getattr(model.base_model, kind.base.layers, None)
        if isinstance(found, nn.ModuleList):
            return found
    return None


def norms_of(layer: nn.Module, kind: LayerKind) -> tuple[nn.Module, nn.Module]:
    """Returns the norms of what the two parts of a layer take."""
    before, behind = (getattr(layer, name) for name in kind.norms)
    return before, behind


def norm_weight(norm: nn.Module, plus_one: bool) -> torch.Tensor:
    """Returns what a norm multiplies by, in float32."""
    weight: torch.Tensor = norm.get_parameter("weight").detach().float()
    return weight + 1.0 if plus_one else weight


def norm_bias(norm: nn.Module) -> torch.Tensor | None:
    """Returns what a LayerNorm adds, in float32; None for an RMSNorm."""
    if not isinstance(norm, nn.LayerNorm):
        return None
    return torch.zeros(norm.normalized_shape) if norm.bias is None else norm.bias.detach().float()


def norm_eps(norm: nn.Module) -> float:
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    assert isinstance(eps, float)
    return eps
