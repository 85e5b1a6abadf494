"""The hand-written decoder layer: same weights as a layer of transformers, fewer and larger operations.

Knows the kinds of layers that are replaced (`layer_kinds`). Does not know loading: it replaces a loaded layer only if
the two agree on random input; a layer that does not agree is kept, and the log says why.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, TypeGuard, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from kernels.cpu import compiled
from kernels.dispatch import Ops
from workers.engine.kv.kv_store import KVShape, KVStore
from workers.engine.layers.linear import MakeLinear, PackedLinear
from workers.engine.layers.merged_linear import joined
from workers.engine.model.hf import AttentionSite, Call, PagedLayer, StepSlot, attach
from workers.engine.model.layer_kinds import MORE_KINDS, PLAIN_KINDS, LayerKind, gate_of, norm_eps, norm_weight
from workers.engine.model.packing import pack
from workers.engine.values.plan import Row

log = logging.getLogger(__name__)

DecoderLayer = LlamaDecoderLayer | MistralDecoderLayer | Qwen2DecoderLayer | Qwen3DecoderLayer
Norm = LlamaRMSNorm | MistralRMSNorm | Qwen2RMSNorm | Qwen3RMSNorm
Rotary = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function of any tensor of the wanted dtype and of positions, which returns cosines and sines."""
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
        self,
        layer: nn.Module,
        kind: LayerKind,
        site: AttentionSite,
        paged: PagedLayer,
        rope: Rope,
        make: MakeLinear = PackedLinear,
    ) -> None:
        super().__init__()
        whole = cast("Any", layer)  # for mypy any attribute of a module is a Tensor or a Module
        attention, mlp = whole.self_attn, whole.mlp
        self.kind, self.paged = kind, paged
        self._rope = rope
        self.scale, self.window, self.softcap = site.scale, site.window, site.softcap
        self.head_dim, self.num_kv_heads, self.num_heads = site.head_dim, site.num_kv_heads, site.num_heads
        self.qkv = joined(make, *(getattr(attention, name) for name in kind.qkv))
        self.output = joined(make, attention.o_proj)
        self.gate_up = joined(make, *(getattr(mlp, name) for name in kind.gate_up))
        self.down = joined(make, mlp.down_proj)
        gate = gate_of(mlp)
        assert gate is not None, "`_fits` looks for others"
        self.gate = gate
        self.norms: tuple[Norm, Norm] = (getattr(layer, kind.norms[0]), getattr(layer, kind.norms[1]))
        self.added_norms: tuple[Any, Any] | None = None
        if kind.added_norms is not None:
            self.added_norms = (getattr(layer, kind.added_norms[0]), getattr(layer, kind.added_norms[1]))
        self.turns_type: str | None = attention.layer_type if kind.turns_by_type else None
        self.qk_norms = _qk_norms(attention, kind)
        self._qk_weight, self._qk_eps = self._qk_norm()

    @property
    def linears(self) -> tuple[nn.Module, nn.Module, nn.Module, nn.Module]:
        return self.qkv, self.output, self.gate_up, self.down

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: object
    ) -> torch.Tensor:
        """Takes and returns `[1, num_tokens, hidden]`, as transformers' model calls its layers."""
        hidden: torch.Tensor = hidden_states[0]
        before, behind = self.norms
        attended, fed = self.added_norms or (nn.Identity(), nn.Identity())
        hidden = hidden + attended(self._attend(self._normed(hidden, before), position_embeddings))
        gate, up = self.gate_up(self._normed(hidden, behind)).chunk(2, dim=-1)
        hidden = hidden + fed(self.down(self.gate(gate) * up))
        return hidden[None]

    def _normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return norm(x) if self.kind.plus_one else _normed(x, norm)

    def _attend(self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        cos, sin = self._rope.of(position_embeddings)
        num_tokens, head_dim = len(x), self.head_dim
        rotated = self.num_heads + self.num_kv_heads
        qkv = self.qkv(x).view(num_tokens, rotated + self.num_kv_heads, head_dim)
        qk = qkv[:, :rotated]
        if self._qk_weight is not None:
            qk = (F.rms_norm(qk, (head_dim,), None, self._qk_eps) * self._qk_weight).to(qkv.dtype)
        qk = qk * cos + qk.roll(head_dim // 2, dims=-1) * sin
        query, key = qk[:, : self.num_heads], qk[:, self.num_heads :]
        call = Call(query, key, qkv[:, rotated:], self.scale, self.window, self.softcap, None)
        out: torch.Tensor = self.output(self.paged.attend(call).view(num_tokens, -1))
        return out

    def _qk_norm(self) -> tuple[torch.Tensor | None, float]:
        """Returns the weights of a norm per head, `[H + KVH, head_dim]`, if the model has one, and their epsilon."""
        if self.qk_norms is None:
            return None, 0.0
        query, key, eps = self.qk_norms
        return torch.cat((query.expand(self.num_heads, -1), key.expand(self.num_kv_heads, -1))), eps


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


def rotary_of(model: PreTrainedModel, layer: LlamaLayer) -> Rotary:
    """Returns the function of a layer's angles."""
    rotary = decoder_of(model).rotary_emb
    return rotary if layer.turns_type is None else partial(cast("Any", rotary), layer_type=layer.turns_type)


def is_of_family(layer: nn.Module) -> TypeGuard[DecoderLayer]:
    """Returns whether the layer is one of the Llama family."""
    return type(layer) in PLAIN_KINDS


def kind_of(layer: nn.Module, device: torch.device, make: MakeLinear) -> LayerKind | None:
    """Returns the kind of a layer that is replaced on the device."""
    if (kind := PLAIN_KINDS.get(type(layer))) is not None:
        return kind
    kind = MORE_KINDS.get(type(layer))
    if kind is None or device.type != "cpu" or make is not PackedLinear or compiled.functions() is None:
        return None
    output = cast("Any", layer).self_attn.o_proj
    return kind if type(output) is nn.Linear else None  # compiled layers take neither parts nor stored formats


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
    ropes: defaultdict[object, Rope] = defaultdict(Rope)
    number = 0
    for index, (layer, site) in enumerate(zip(layers, sites, strict=False)):
        kind = kind_of(layer, ops.device, make)
        if kind is None or not _fits(layer, kind, site):
            continue
        rope = ropes[site.window if kind.turns_by_type else None]
        mine, error = _checked(model, layer, kind, site, rope, ops)
        if error <= TOLERANCE[model.dtype]:
            paged = PagedLayer(store, index, ops, step)
            if make is not PackedLinear:  # the comparison used the exact weights
                mine = LlamaLayer(layer, kind, site, paged, rope, make)
            mine.paged = paged
            layers[index] = mine
            number += 1
        else:
            log.warning("layer %d stays transformers' own: off by %.1e", index, error)
    return number


def _fits(layer: nn.Module, kind: LayerKind, site: AttentionSite) -> bool:
    whole = cast("Any", layer)
    attention, mlp = whole.self_attn, whole.mlp
    rope = attention.config.rope_parameters or {}
    return (
        attention is site.module
        and gate_of(mlp) is not None
        and (site.softcap == 0.0 or kind not in PLAIN_KINDS.values())
        and not site.has_sinks
        and (rope.get("partial_rotary_factor") or 1.0) == 1.0
    )


def _checked(
    model: PreTrainedModel, layer: nn.Module, kind: LayerKind, site: AttentionSite, rope: Rope, ops: Ops
) -> tuple[LlamaLayer, float]:
    """Returns the new layer, and its largest difference from the old one on a chunk and a single token, relative to the
    largest output."""
    weight = layer.get_parameter(f"{kind.norms[0]}.weight")
    x = torch.randn((1, 6, len(weight)), generator=torch.Generator().manual_seed(0)).to(weight)
    shape = KVShape(1, site.num_kv_heads, site.head_dim, 4, weight.dtype)
    step, store = StepSlot(), KVStore(shape, 4, weight.device, ops)
    packed = pack([Row([0], 0, [3]), Row([0] * 5, 0, [1, 2])], 4, weight.device)
    step.context = packed.context
    attach([site], store, ops, step)
    mine = LlamaLayer(layer, kind, site, PagedLayer(store, 0, ops, step), rope)
    embeddings = rotary_of(model, mine)(x, packed.positions[None])
    expected = layer(x, position_embeddings=embeddings, attention_mask=None)
    found = mine(x, position_embeddings=embeddings)
    return mine, ((found - expected).abs().max() / expected.abs().max()).item()


def _qk_norms(attention: Any, kind: LayerKind) -> tuple[torch.Tensor, torch.Tensor, float] | None:
    """Returns the weights `[head_dim]` of the norms of queries and of keys, and their epsilon."""
    if not kind.norms_heads:
        return None
    query, key = attention.q_norm, attention.k_norm
    if not kind.plus_one:
        return query.weight, key.weight, norm_eps(query)
    return norm_weight(query, True), norm_weight(key, True), norm_eps(query)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
