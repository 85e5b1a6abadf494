"""A pass of the Llama family in few launches: norms with their residual, rotation with the KV write, gated products.

It knows the hand-written layers and ops. It does not know loading: it runs over layers that `llama.install` put in
place, and only if each agrees with its unfused self on random input. A layer takes ten launches, with attention counted
as two.
"""

from __future__ import annotations

import logging
from typing import TypeGuard

import torch
from torch import nn
from transformers import PreTrainedModel

from kernels.dispatch import TWINS, Ops
from workers.engine.kv.kv_store import KVShape, KVStore
from workers.engine.layers import moe
from workers.engine.model.hf import Call, PagedLayer, StepSlot
from workers.engine.model.layer_kinds import PLAIN_KINDS
from workers.engine.model.llama import LlamaLayer, Norm, Rotary, angles_of, decoder_of, rotary_of
from workers.engine.model.packing import pack
from workers.engine.values.plan import Row

log = logging.getLogger(__name__)

_OPS = ("rms_norm", "rope_kv_write", "silu_mul")


class FusedPass:
    """Computes `hf.hidden_states` of one model, with its own loop over the layers: what a layer adds to the residual
    stream is added by the norm of the next one."""

    def __init__(self, model: PreTrainedModel, ops: Ops, step: StepSlot, max_positions: int) -> None:
        base = decoder_of(model)
        self._embed, self._norm, self.layers = base.embed_tokens, base.norm, list(base.layers)
        self._ops = ops
        self._step = step
        rotary = rotary_of(model, self.layers[0])
        assert rotary is not None, "layers of the Llama family rotate"
        self._table = rope_table(rotary, max_positions, self._embed.weight.device)

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden, residual = self._embed(token_ids), None
        for layer in self.layers:
            hidden, residual = self.run(layer, hidden, residual, positions)
        return self._normed(hidden, self._norm, residual)

    def run(
        self, layer: LlamaLayer, hidden: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs one layer. `hidden` is what the layer before adds to `residual`; the first layer's residual is its input
        itself."""
        x = self._normed(hidden, layer.norms[0], residual)
        residual = hidden if residual is None else residual
        added = layer.output(self._attend(layer, layer.qkv(x), positions))
        gates = layer.gate_up(self._normed(added, layer.norms[1], residual))
        product = gates.new_empty(len(gates), gates.shape[1] // 2)
        self._ops.silu_mul(product, gates)
        return layer.down(product), residual

    def _attend(self, layer: LlamaLayer, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        step, (kv, scales) = self._step.context, layer.paged.kv
        assert step is not None, "a pass outside a step"
        number = len(step.slots)
        of_query, of_key, eps = layer.qk_norms or (None, None, 0.0)
        weights = None if of_query is None or of_key is None else (of_query, of_key)
        where = (self._table, positions[:number], step.slots)
        self._ops.rope_kv_write(kv, qkv[:number], *where, weights, eps, kv_scales=scales)
        heads = qkv.view(len(qkv), -1, layer.head_dim)
        query, key, value = heads.split((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), dim=1)
        call = Call(query, key, value, layer.scale, layer.window, 0.0, None)
        return layer.paged.attend_written(call, step).view(len(qkv), -1)

    def _normed(self, x: torch.Tensor, norm: Norm, residual: torch.Tensor | None) -> torch.Tensor:
        """Returns the normalised rows. If a residual is given, `x` is added to it in place, and the sum is
        normalised."""
        out = torch.empty_like(x)
        self._ops.rms_norm(out, x, norm.weight, norm.variance_epsilon, residual)
        return out


def build(model: PreTrainedModel, ops: Ops, step: StepSlot, max_positions: int) -> FusedPass | None:
    """Returns None if the ops run as their twins (unfused is as fast), if a layer is not ours, or if a layer
    differs."""
    if any(ops.chosen[name] is TWINS[name] for name in _OPS):
        return None
    layers = getattr(model.base_model, "layers", ())
    if not layers or not all(is_plain(layer) for layer in layers):
        return None
    trial = StepSlot()
    mine = FusedPass(model, ops, trial, max_positions)
    for index, layer in enumerate(mine.layers):
        error = difference(model, mine, layer, ops, trial)
        if not error <= moe.TOLERANCE[layer.norms[0].weight.dtype]:
            log.warning("the layers stay unfused: layer %d is off by %.1e", index, error)
            return None
    return FusedPass(model, ops, step, max_positions)


def is_plain(layer: nn.Module) -> TypeGuard[LlamaLayer]:
    """Returns whether a layer is hand-written and has no more than those of the Llama family."""
    return isinstance(layer, LlamaLayer) and layer.kind in PLAIN_KINDS.values()


def difference(model: PreTrainedModel, mine: FusedPass, layer: LlamaLayer, ops: Ops, trial: StepSlot) -> float:
    """Returns the largest difference of a fused layer from itself unfused, on a chunk and a single token, relative to
    the largest output."""
    weight = layer.norms[0].weight
    x = torch.randn((6, len(weight)), generator=torch.Generator().manual_seed(1)).to(weight)
    shape = KVShape(1, layer.num_kv_heads, layer.head_dim, 4, weight.dtype)
    packed = pack([Row([0], 0, [3]), Row([0] * 5, 0, [1, 2])], 4, weight.device)
    trial.context = packed.context
    served, layer.paged = (layer.paged, PagedLayer(KVStore(shape, 4, weight.device, ops), 0, ops, trial))
    expected: torch.Tensor = layer(x[None], **angles_of(model, layer, x[None], packed.positions))[0]
    added, residual = mine.run(layer, x.clone(), None, packed.positions)
    layer.paged = served
    return ((residual + added - expected).abs().max() / expected.abs().max()).item()


def rope_table(rotary: Rotary, max_positions: int, device: torch.device) -> torch.Tensor:
    """Returns `[max_positions, turned]` float32, for as many columns of a head as are rotated: the cosines of a
    position's angles, then their sines. They are computed as transformers does, but are not rounded to the model's
    dtype."""
    positions = torch.arange(max_positions, device=device)
    cos, sin = rotary(torch.empty(1, dtype=torch.float32, device=device), positions[None])
    half = cos.shape[-1] // 2
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1).contiguous()
