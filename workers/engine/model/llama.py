"""The hand-written decoder layer: same weights as a layer of transformers, fewer and larger operations.

It knows the kinds of layers that are replaced (`layer_kinds`). It does not know loading: it replaces a loaded layer
only if the two agree on random input; a layer that does not agree is kept, and the log says why.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm
from transformers.pytorch_utils import Conv1D

from kernels.cpu import compiled
from kernels.dispatch import Ops
from workers.engine.kv.kv_store import KVShape, KVStore
from workers.engine.layers import moe
from workers.engine.layers.linear import MakeLinear, PackedLinear
from workers.engine.layers.merged_linear import joined
from workers.engine.model.hf import AttentionSite, Call, PagedLayer, StepSlot, attach
from workers.engine.model.layer_kinds import (
    MORE_KINDS,
    PLAIN_KINDS,
    LayerKind,
    gate_of,
    is_parallel,
    layers_of,
    norm_eps,
    norm_weight,
    norms_of,
)
from workers.engine.model.packing import pack
from workers.engine.values.plan import Row

log = logging.getLogger(__name__)

DecoderLayer = LlamaDecoderLayer | MistralDecoderLayer | Qwen2DecoderLayer | Qwen3DecoderLayer
Norm = LlamaRMSNorm | MistralRMSNorm | Qwen2RMSNorm | Qwen3RMSNorm
Rotary = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function of any tensor of the wanted dtype and of positions, which returns cosines and sines."""


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
        attention, mlp = getattr(whole, kind.attention), whole.mlp
        self.kind, self.paged = kind, paged
        self.is_parallel = is_parallel(layer, kind)
        self._rope = rope
        self.scale, self.window, self.softcap = site.scale, site.window, site.softcap
        self.head_dim, self.num_kv_heads, self.num_heads = site.head_dim, site.num_kv_heads, site.num_heads
        qkv = [_linear(getattr(attention, name)) for name in kind.qkv]
        self.qkv = joined(make, *([_by_part(qkv[0], site)] if kind.by_head else qkv))
        self.output = joined(make, _linear(getattr(attention, kind.output)))
        self.experts: nn.Module | None = whole.mlp if moe.fits(mlp) else None
        """A block of experts in place of the products that follow, which `moe.install` replaces."""
        if self.experts is None:
            self.gate_up = joined(make, *(_linear(getattr(mlp, name)) for name in kind.gate_up))
            self.down = joined(make, _linear(getattr(mlp, kind.down)))
        gate = gate_of(_gated_part(mlp))
        assert gate is not None, "`_fits` looks for others"
        self.gate = gate
        self.norms = cast("tuple[Norm, Norm]", norms_of(layer, kind))
        self.added_norms: tuple[Any, Any] | None = None
        if kind.added_norms is not None:
            self.added_norms = (getattr(layer, kind.added_norms[0]), getattr(layer, kind.added_norms[1]))
        self.turns_type: str | None = attention.layer_type if kind.turns_by_type else None
        self.qk_norms = _qk_norms(attention, kind)
        self._qk_weight, self._qk_eps = self._qk_norm()

    @property
    def linears(self) -> tuple[nn.Module, ...]:
        """The layer's products but those of experts."""
        return (self.qkv, self.output) if self.experts is not None else (self.qkv, self.output, self.gate_up, self.down)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *_: object,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **__: object,
    ) -> torch.Tensor:
        """Takes and returns `[1, num_tokens, hidden]`, as transformers' model calls its layers."""
        hidden: torch.Tensor = hidden_states[0]
        before, behind = self.norms
        attended, fed = self.added_norms or (nn.Identity(), nn.Identity())
        with_attended = hidden + attended(self._attend(self._normed(hidden, before), position_embeddings))
        x = self._normed(hidden if self.is_parallel else with_attended, behind)
        hidden = with_attended + fed(self.feed(x))
        return hidden[None]

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        """Returns for normed rows what the part behind attention adds, before a norm of it."""
        if self.experts is not None:
            found: torch.Tensor = self.experts(x[None])[0]
            return found
        products = self.gate_up(x)
        if self.kind.is_gated:
            gate, up = products.chunk(2, dim=-1)
            products = self.gate(gate).mul_(up)
        else:
            products = self.gate(products)
        added: torch.Tensor = self.down(products)
        return added

    def _normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return norm(x) if self.kind.plus_one or isinstance(norm, nn.LayerNorm) else _normed(x, norm)

    def _attend(self, x: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        num_tokens, head_dim = len(x), self.head_dim
        rotated = self.num_heads + self.num_kv_heads
        qkv = self.qkv(x).view(num_tokens, rotated + self.num_kv_heads, head_dim)
        qk = qkv[:, :rotated]
        if self._qk_weight is not None:
            qk = (F.rms_norm(qk, (head_dim,), None, self._qk_eps) * self._qk_weight).to(qkv.dtype)
        if position_embeddings is not None:
            qk = rotated_by(qk, *self._rope.of(position_embeddings))
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


@dataclass(frozen=True, slots=True)
class Decoder:
    """The parts of transformers' inner model around such layers."""

    embed_tokens: nn.Embedding
    places: nn.Embedding | None
    """The embedding of positions, if there is one."""
    layers: Sequence[LlamaLayer]
    """The layers, once `install` has replaced all of them."""
    norm: Norm


def decoder_of(model: PreTrainedModel) -> Decoder:
    """Returns the inner model of a model all of whose layers are hand-written."""
    layers = cast("Sequence[LlamaLayer]", layers_of(model))
    base, parts = cast("Any", model.base_model), layers[0].kind.base
    places = getattr(base, parts.places) if parts.places else None
    return Decoder(getattr(base, parts.embed), places, layers, getattr(base, parts.norm))


def rotary_of(model: PreTrainedModel, layer: LlamaLayer) -> Rotary | None:
    """Returns the function of a layer's angles; None if it rotates nothing."""
    if not layer.kind.rotates:
        return None
    rotary = cast("Any", model.base_model).rotary_emb
    found: Rotary = rotary if layer.turns_type is None else partial(rotary, layer_type=layer.turns_type)
    return found


def rotated_by(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Returns heads `[num_tokens, heads, head_dim]` whose first columns are rotated, as many as `cos` and `sin`
    `[num_tokens, 1, turned]` have. rotate_half is a roll by half of them; its sign is in the sine."""
    size = cos.shape[-1]
    turned = heads[..., :size]
    turned = torch.addcmul(turned * cos, turned.roll(size // 2, dims=-1), sin)
    return turned if size == heads.shape[-1] else torch.cat((turned, heads[..., size:]), dim=-1)


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
    output = getattr(getattr(layer, kind.attention), kind.output)
    # Compiled layers take neither parts nor stored formats.
    return kind if type(output) in (nn.Linear, Conv1D) else None


def install(
    model: PreTrainedModel,
    sites: list[AttentionSite],
    store: KVStore,
    ops: Ops,
    step: StepSlot,
    make: MakeLinear = PackedLinear,
) -> int:
    """Replaces every layer that can be replaced, and returns their number. Leaves the attention modules of all others
    unattached; a replaced layer stands in its site itself. `make` builds the linear layers once the layer has been found right with exact ones."""
    layers = layers_of(model) or nn.ModuleList()
    ropes: defaultdict[object, Rope] = defaultdict(Rope)
    number = 0
    kinds = [kind_of(layer, ops.device, make) for layer in layers]
    each = zip(layers, sites, kinds, strict=False)
    fit = [kind is not None and _fits(layer, site, kind) for layer, site, kind in each]
    for index, (layer, site, kind) in enumerate(zip(layers, sites, kinds, strict=False)):
        # A compiled call takes all layers or none, and other ways leave these families to transformers.
        if kind is None or not (fit[index] if kind in PLAIN_KINDS.values() else all(fit)):
            continue
        rope = ropes[site.window if kind.turns_by_type else None]
        mine, error = _checked(model, layer, kind, site, rope, ops)
        if error <= moe.TOLERANCE[model.dtype]:
            paged = PagedLayer(store, index, ops, step)
            if make is not PackedLinear:  # the comparison used the exact weights
                mine = LlamaLayer(layer, kind, site, paged, rope, make)
            mine.paged = paged
            layers[index] = mine
            sites[index] = replace(site, module=mine)  # the old module holds its products, which exist packed now
            number += 1
        else:
            log.warning("layer %d stays transformers' own: off by %.1e", index, error)
    return number


def _fits(layer: nn.Module, site: AttentionSite, kind: LayerKind) -> bool:
    whole = cast("Any", layer)
    attention, mlp = getattr(whole, kind.attention), whole.mlp
    rope, is_plain = getattr(attention.config, "rope_parameters", None) or {}, kind in PLAIN_KINDS.values()
    return (
        attention is site.module
        and gate_of(_gated_part(mlp)) is not None
        and (not kind.may_have_experts or not hasattr(mlp, "experts") or moe.has_panels(mlp))
        and (site.softcap == 0.0 or not is_plain)
        and not site.has_sinks
        and not getattr(attention, "qk_layernorm", False)
        and ((rope.get("partial_rotary_factor") or 1.0) == 1.0 or not is_plain)
    )


def _gated_part(mlp: nn.Module) -> nn.Module:
    """Returns the module with the function of the gate."""
    return cast("nn.Module", mlp.experts) if moe.fits(mlp) else mlp


def _checked(
    model: PreTrainedModel, layer: nn.Module, kind: LayerKind, site: AttentionSite, rope: Rope, ops: Ops
) -> tuple[LlamaLayer, float]:
    """Returns the new layer, and its largest difference from the old one on a chunk and a single token, relative to the
    largest output."""
    weight = norms_of(layer, kind)[0].get_parameter("weight")
    x = torch.randn((1, 6, len(weight)), generator=torch.Generator().manual_seed(0)).to(weight)
    shape = KVShape(1, site.num_kv_heads, site.head_dim, 4, weight.dtype)
    step, store = StepSlot(), KVStore(shape, 4, weight.device, ops)
    packed = pack([Row([0], 0, [3]), Row([0] * 5, 0, [1, 2])], 4, weight.device)
    step.context = packed.context
    attach([site], store, ops, step)
    mine = LlamaLayer(layer, kind, site, PagedLayer(store, 0, ops, step), rope)
    embeddings = angles_of(model, mine, x, packed.positions)
    expected, sure = moe.called(mine.experts, lambda: layer(x, attention_mask=None, **embeddings))
    found = mine(x, **embeddings)
    if not sure.any():  # the compiled layer is compared on more tokens
        return mine, 0.0
    return mine, ((found - expected)[:, sure].abs().max() / expected.abs().max()).item()


def angles_of(model: PreTrainedModel, layer: LlamaLayer, x: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
    """Returns the argument with which transformers calls a layer for tokens at these positions; none if it rotates
    nothing."""
    rotary = rotary_of(model, layer)
    return {} if rotary is None else {"position_embeddings": rotary(x, positions[None])}


def _linear(layer: nn.Module) -> nn.Linear:
    """Returns a layer as one with a weight `[out_features, in_features]`."""
    if not isinstance(layer, Conv1D):
        return cast("nn.Linear", layer)
    return _linear_of(layer.weight.t(), layer.bias)


def _by_part(qkv: nn.Linear, site: AttentionSite) -> nn.Linear:
    """Returns a layer whose outputs are all queries, then all keys and all values, for one that has those of each head
    side by side."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        by_head = tensor.reshape(site.num_heads, 3, site.head_dim, *tensor.shape[1:])
        return by_head.transpose(0, 1).reshape(tensor.shape)

    return _linear_of(moved(qkv.weight), None if qkv.bias is None else moved(qkv.bias))


def _linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    out_features, in_features = weight.shape
    with torch.device("meta"):
        made = nn.Linear(in_features, out_features, bias=False)
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
    return made


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
