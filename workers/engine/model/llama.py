"""The hand-written decoder layer of the Llama family: same weights, fewer and larger operations.

Knows Llama, Mistral, Qwen2 and Qwen3 layers of transformers. Does not know loading: it replaces a loaded layer only if
the two agree on random input; a layer that does not agree is kept, and the log says why.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol, TypeGuard, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralDecoderLayer, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2DecoderLayer, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3DecoderLayer, Qwen3RMSNorm

from kernels.dispatch import Ops
from workers.engine.kv.kv_store import KVShape, KVStore
from workers.engine.layers.linear import MakeLinear, PackedLinear
from workers.engine.layers.merged_linear import joined
from workers.engine.model.hf import AttentionSite, Call, PagedLayer, StepSlot, attach
from workers.engine.model.packing import pack
from workers.engine.values.plan import Row

log = logging.getLogger(__name__)

DecoderLayer = LlamaDecoderLayer | MistralDecoderLayer | Qwen2DecoderLayer | Qwen3DecoderLayer
Attention = LlamaAttention | MistralAttention | Qwen2Attention | Qwen3Attention
Norm = LlamaRMSNorm | MistralRMSNorm | Qwen2RMSNorm | Qwen3RMSNorm
LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Tolerances relative to the largest output of a layer: the rounding of one operation more or less."""


class Rope:
    """Cosines and sines of a pass in the layers' layout, computed by the first layer for all. The layers of one model
    share them."""

    def __init__(self) -> None:
        self._source: object = None
        self._ready: tuple[torch.Tensor, torch.Tensor] = (torch.empty(0), torch.empty(0))

    def of(self, source: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        if source is not self._source:
            cos, sin = source[0][0, :, None], source[1][0, :, None]
            low, high = sin.chunk(2, dim=-1)
            # rotate_half negates the upper half of what it moves down: the sign is put into the sine, once.
            self._ready = (cos, torch.cat((-low, high), dim=-1))
            self._source = source
        return self._ready


class LlamaLayer(nn.Module):
    """A decoder layer. It keeps nothing of the layer it replaces but the norms, so that the weights exist once."""

    def __init__(
        self, layer: DecoderLayer, site: AttentionSite, paged: PagedLayer, rope: Rope, make: MakeLinear = PackedLinear
    ) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.paged = paged
        self._rope = rope
        self.scale, self.window = site.scale, site.window
        self.head_dim, self.num_kv_heads = site.head_dim, site.num_kv_heads
        self.num_heads = attention.q_proj.out_features // site.head_dim
        self.qkv = joined(make, attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = joined(make, attention.o_proj)
        self.gate_up = joined(make, mlp.gate_proj, mlp.up_proj)
        self.down = joined(make, mlp.down_proj)
        self.norms: tuple[Norm, Norm] = (layer.input_layernorm, layer.post_attention_layernorm)
        self.qk_norms = _qk_norms(attention)
        self._qk_weight, self._qk_eps = _qk_norm(attention, self.num_heads, site.num_kv_heads)

    @property
    def linears(self) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
        return self.qkv, self.output, self.gate_up, self.down

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: object
    ) -> torch.Tensor:
        """Takes and returns `[1, num_tokens, hidden]`, as transformers' model calls its layers."""
        hidden: torch.Tensor = hidden_states[0]
        hidden = hidden + self._attend(_normed(hidden, self.norms[0]), position_embeddings)
        gate, up = self.gate_up(_normed(hidden, self.norms[1])).chunk(2, dim=-1)
        hidden = hidden + self.down(F.silu(gate) * up)
        return hidden[None]

    def _attend(self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        cos, sin = self._rope.of(position_embeddings)
        num_tokens, head_dim = len(x), self.head_dim
        rotated = self.num_heads + self.num_kv_heads
        qkv = self.qkv(x).view(num_tokens, rotated + self.num_kv_heads, head_dim)
        qk = qkv[:, :rotated]
        if self._qk_weight is not None:
            qk = F.rms_norm(qk, (head_dim,), None, self._qk_eps) * self._qk_weight
        qk = qk * cos + qk.roll(head_dim // 2, dims=-1) * sin
        query, key = qk[:, : self.num_heads], qk[:, self.num_heads :]
        call = Call(query, key, qkv[:, rotated:], self.scale, self.window, 0.0, None)
        out: torch.Tensor = self.output(self.paged.attend(call).view(num_tokens, -1))
        return out


class Decoder(Protocol):
    """The inner model of transformers around such layers."""

    @property
    def embed_tokens(self) -> nn.Embedding: ...
    @property
    def layers(self) -> Sequence[LlamaLayer]:
        """The layers, once `install` has replaced all of them."""
        ...

    @property
    def norm(self) -> Norm: ...
    @property
    def rotary_emb(self) -> nn.Module: ...


def decoder_of(model: PreTrainedModel) -> Decoder:
    """The inner model of a model that has layers of this family."""
    return cast("Decoder", model.base_model)  # for mypy any attribute of a module is a Tensor or a Module


def is_of_family(layer: nn.Module) -> TypeGuard[DecoderLayer]:
    return type(layer) in LAYERS


def install(
    model: PreTrainedModel,
    sites: list[AttentionSite],
    store: KVStore,
    ops: Ops,
    step: StepSlot,
    make: MakeLinear = PackedLinear,
) -> int:
    """Replaces every layer that can be replaced, and returns their number. Leaves the attention modules of all others
    unattached. `make` builds the linear layers once the layer has been found right with exact ones."""
    layers: nn.ModuleList = getattr(model.base_model, "layers", nn.ModuleList())
    rope, number = Rope(), 0
    for index, (layer, site) in enumerate(zip(layers, sites, strict=False)):
        if not _fits(layer, site):
            continue
        mine, error = _checked(model, layer, site, rope, ops)
        if error <= TOLERANCE[model.dtype]:
            paged = PagedLayer(store, index, ops, step)
            if make is not PackedLinear:  # the comparison used the exact weights
                mine = LlamaLayer(layer, site, paged, rope, make)
            mine.paged = paged
            layers[index] = mine
            number += 1
        else:
            log.warning("layer %d stays transformers' own: off by %.1e", index, error)
    return number


def _fits(layer: nn.Module, site: AttentionSite) -> TypeGuard[DecoderLayer]:
    return (
        is_of_family(layer)
        and layer.self_attn is site.module
        and layer.self_attn.config.hidden_act in ("silu", "swish")
        and site.softcap == 0.0
        and not site.has_sinks
        and ((layer.self_attn.config.rope_parameters or {}).get("partial_rotary_factor") or 1.0) == 1.0
    )


def _checked(
    model: PreTrainedModel, layer: DecoderLayer, site: AttentionSite, rope: Rope, ops: Ops
) -> tuple[LlamaLayer, float]:
    """Returns the new layer, and its largest difference from the old one on a chunk and a single token, relative to the
    largest output."""
    weight = layer.input_layernorm.weight
    x = torch.randn((1, 6, len(weight)), generator=torch.Generator().manual_seed(0)).to(weight)
    shape = KVShape(1, site.num_kv_heads, site.head_dim, 4, weight.dtype)
    step, store = StepSlot(), KVStore(shape, 4, weight.device, ops)
    packed = pack([Row([0], 0, [3]), Row([0] * 5, 0, [1, 2])], 4, weight.device)
    step.context = packed.context
    attach([site], store, ops, step)
    mine = LlamaLayer(layer, site, PagedLayer(store, 0, ops, step), rope)
    embeddings = decoder_of(model).rotary_emb(x, packed.positions[None])
    expected = layer(x, position_embeddings=embeddings)
    found = mine(x, position_embeddings=embeddings)
    return mine, ((found - expected).abs().max() / expected.abs().max()).item()


def _qk_norm(attention: Attention, num_heads: int, num_kv_heads: int) -> tuple[torch.Tensor | None, float]:
    """Returns the weights of a norm per head, `[H + KVH, head_dim]`, if the model has one (Qwen3), and their
    epsilon."""
    if not isinstance(attention, Qwen3Attention):
        return None, 0.0
    q, k = attention.q_norm, attention.k_norm
    weight = torch.cat((q.weight.expand(num_heads, -1), k.weight.expand(num_kv_heads, -1)))
    return weight, q.variance_epsilon


def _qk_norms(attention: Attention) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """Returns the weights `[head_dim]` of the norms of queries and of keys, and their epsilon."""
    if not isinstance(attention, Qwen3Attention):
        return None
    q, k = attention.q_norm, attention.k_norm
    return q.weight, k.weight, q.variance_epsilon


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
