"""A pass over hand-written layers on a CPU: its own loop, with as few operations as torch allows.

It knows the hand-written layers and ops. It does not know loading: it runs over layers that `llama.install` put in
place, and only if each agrees with itself called by transformers. If products are computed in float32, weights and KV
may have 16 bits, and everything between them is float32. If there are compiled layers (`kernels.cpu`), rows run through
them. Torch's operations then do only what those layers cannot: token trees, adapters, and rows whose attention is
measured.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from kernels.arguments.batch import PagedBatch, Slots
from kernels.dispatch import Ops
from workers.engine.kv.kv_store import KVShape, KVStore
from workers.engine.layers import moe
from workers.engine.layers.linear import MIN_ROWS, PackedLinear, Product
from workers.engine.layers.norm import RmsNorm
from workers.engine.model import compiled_rows
from workers.engine.model.fused import rope_table
from workers.engine.model.hf import Call, PagedLayer, StepContext, StepSlot
from workers.engine.model.layer_kinds import LayerKind, layers_of, norm_bias, norm_eps, norm_weight
from workers.engine.model.llama import LlamaLayer, Rotary, angles_of, decoder_of, rotary_of, rotated_by
from workers.engine.model.packing import pack
from workers.engine.values.plan import Row

log = logging.getLogger(__name__)

_TRIAL_BLOCK = 16
"""Tokens of a block while a layer is tried: whole tiles of keys, as in the usual worker."""


class CpuPass:
    """Computes `hf.hidden_states` of one model."""

    def __init__(self, model: PreTrainedModel, ops: Ops, step: StepSlot, max_positions: int) -> None:
        base = decoder_of(model)
        self._embed, self._places, self.layers = base.embed_tokens, base.places, list(base.layers)
        self._ops, self._step = ops, step
        products = [product for layer in self.layers for product in _products(layer)]
        wide = all(product.is_wide for product in products)
        self.dtype = torch.float32 if wide else self._embed.weight.dtype
        """The dtype of inputs and outputs of linear layers and attention. The residual stream is float32."""
        self.min_tokens = 1 if all(product.is_alone for product in products) else MIN_ROWS
        self._norm = _norm(base.norm, self.layers[0].kind)
        self._norms = [[_norm(norm, layer.kind) for norm in layer.norms] for layer in self.layers]
        self._added_norms = [
            [_norm(norm, layer.kind) for norm in layer.added_norms or ()] or None for layer in self.layers
        ]
        self._qk = [_qk_weight(layer, self.dtype) for layer in self.layers]
        rotaries = {layer.turns_type: rotary_of(model, layer) for layer in self.layers}
        tables = {kind: _table(of, max_positions) for kind, of in rotaries.items()}
        self._angles = {kind: _angles(table, self.dtype) for kind, table in tables.items()}
        self._compiled = compiled_rows.build(self.layers, tables)

    @property
    def is_compiled(self) -> bool:
        """True if rows run through the compiled layers."""
        return self._compiled is not None

    def __call__(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self._embed(token_ids).float()
        if self._places is not None:
            hidden += self._places(positions)
        self.run(range(len(self.layers)), hidden, positions)
        return self._norm(hidden).to(self.dtype)

    def run(self, layers: range, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Runs layers. `hidden` `[num_tokens, hidden]`, float32, is overwritten with their output."""
        step = self._step.context
        assert step is not None, "a pass outside a step"
        rows = self._compiled_rows(step)
        end = sum(batch.starts[-1] for batch in rows)
        if self._compiled is not None and rows:
            self._compiled(hidden[:end], positions[:end], rows, layers)
        if end < len(step.slots):
            self._step.context = _behind(step, end)
            self.run_plain(layers, hidden[end:], positions[end:])
            self._step.context = step

    def _compiled_rows(self, step: StepContext) -> list[PagedBatch]:
        """Returns the batches that run through the compiled layers; their rows come first in the pass. A step that
        needs more than these layers can do has none."""
        batches = [batch for batch in (step.decode, step.prefill) if batch is not None]
        more = step.adapted or step.shared is not None or step.mass is not None
        if self._compiled is None or more or any(batch.given is not None for batch in batches):
            return []
        return batches

    def run_plain(self, layers: range, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        """Does the same as `run` with torch's operations alone."""
        turns = {kind: (cos[positions][:, None], sin[positions][:, None]) for kind, (cos, sin) in self._angles.items()}
        for index in layers:
            layer, (before, behind) = self.layers[index], self._norms[index]
            attended, fed = self._added_norms[index] or (None, None)
            qkv = layer.qkv(before(hidden).to(self.dtype))
            both = behind(hidden).to(self.dtype) if layer.is_parallel else None
            added = layer.output(self._attend(layer, self._qk[index], qkv, turns[layer.turns_type]))
            hidden += added if attended is None else attended(added.float())
            x = behind(hidden).to(self.dtype) if both is None else both
            added = layer.feed(x)
            hidden += added if fed is None else fed(added.float())

    def _attend(
        self,
        layer: LlamaLayer,
        qk_weight: torch.Tensor | None,
        qkv: torch.Tensor,
        turns: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        step, (kv, scales) = self._step.context, layer.paged.kv
        assert step is not None, "a pass outside a step"
        num_tokens, number = len(qkv), len(step.slots)
        rotated = layer.num_heads + layer.num_kv_heads
        heads = qkv.view(num_tokens, rotated + layer.num_kv_heads, layer.head_dim)
        qk = heads[:, :rotated]
        if qk_weight is not None:
            assert layer.qk_norms is not None
            qk = F.rms_norm(qk, (layer.head_dim,), None, layer.qk_norms[2]) * qk_weight
        if layer.kind.rotates:
            qk = rotated_by(qk, *turns)
        query, key, value = qk[:, : layer.num_heads], qk[:, layer.num_heads :], heads[:, rotated:]
        if scales is None and kv.dtype != self.dtype:
            key, value = key.to(kv.dtype), value.to(kv.dtype)
        self._ops.kv_write(kv, key[:number], value[:number], step.slots, scales)
        call = Call(query, key, value, layer.scale, layer.window, layer.softcap, None)
        return layer.paged.attend_written(call, step).view(num_tokens, -1)


def _behind(step: StepContext, num_tokens: int) -> StepContext:
    """Returns the step without its compiled rows, which have `num_tokens` tokens."""
    if num_tokens == 0:
        return step
    slots = Slots(step.slots.slots[num_tokens:], step.slots.block_size)
    return dataclasses.replace(step, slots=slots, decode=None, prefill=None)


def _products(layer: LlamaLayer) -> Iterator[Product]:
    for linear in layer.linears:
        assert isinstance(linear, PackedLinear), "`build` looks for others"
        yield linear.product


def _norm(norm: nn.Module, kind: LayerKind) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a norm of rows in float32."""
    weight, eps, bias = norm_weight(norm, kind.plus_one), norm_eps(norm), norm_bias(norm)
    if bias is None:
        return RmsNorm(weight, eps)
    return lambda x: F.layer_norm(x, weight.shape, weight, bias, eps)


def _qk_weight(layer: LlamaLayer, dtype: torch.dtype) -> torch.Tensor | None:
    """Returns the weights of the query and key norms, `[H + KVH, head_dim]`, or None if the layer has no such norms."""
    if layer.qk_norms is None:
        return None
    q, k, _ = layer.qk_norms
    weights = (q.expand(layer.num_heads, -1), k.expand(layer.num_kv_heads, -1))
    return torch.cat(weights).detach().to(dtype)


def _table(rotary: Rotary | None, max_positions: int) -> torch.Tensor:
    """Returns the table of a type of angles (`fused.rope_table`); without any it has no columns."""
    cpu = torch.device("cpu")
    return torch.empty((max_positions, 0)) if rotary is None else rope_table(rotary, max_positions, cpu)


def _angles(table: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two tables, `[max_positions, turned]` each: cosines twice, and sines that carry the sign of
    rotate_half."""
    cos, sin = table.chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def build(model: PreTrainedModel, ops: Ops, step: StepSlot, max_positions: int) -> CpuPass | None:
    """Returns None on another device, if a layer or a product is not ours, or if a layer differs."""
    layers = layers_of(model)
    if ops.device.type != "cpu" or not layers:
        return None
    for layer in layers:
        if not isinstance(layer, LlamaLayer):
            return None
        if not all(isinstance(linear, PackedLinear) for linear in layer.linears):
            return None
        if layer.experts is not None and not (isinstance(layer.experts, moe.MoeBlock) and layer.experts.packed):
            return None
    trial = StepSlot()
    mine = CpuPass(model, ops, trial, max_positions)
    for index, layer in enumerate(mine.layers):
        error = _difference(model, mine, index, ops, trial)
        if not error <= moe.TOLERANCE[layer.norms[0].weight.dtype]:
            log.warning("transformers calls the layers: layer %d is off by %.1e", index, error)
            return None
    return CpuPass(model, ops, step, max_positions)


def _difference(model: PreTrainedModel, mine: CpuPass, index: int, ops: Ops, trial: StepSlot) -> float:
    """Returns how far a layer is from itself as transformers calls it, on a prompt in three chunks, one of them a
    single token. It is computed by the compiled layers and by torch's operations, and the larger difference is
    returned, as a length relative to that of all outputs: one wrong token of these contributes about a fifth of it."""
    layer = mine.layers[index]
    weight = layer.norms[0].weight
    number, chunks = 24, ((0, 18), (18, 19), (19, 24))
    x = torch.randn((number, len(weight)), generator=torch.Generator().manual_seed(1)).to(weight)
    shape = KVShape(1, layer.num_kv_heads, layer.head_dim, _TRIAL_BLOCK, weight.dtype)
    store = KVStore(shape, 4, weight.device, ops)
    served, layer.paged = layer.paged, PagedLayer(store, 0, ops, trial)
    table = [3, 1]
    whole = pack([Row([0] * number, 0, table)], _TRIAL_BLOCK, weight.device)
    trial.context = whole.context
    embeddings = angles_of(model, layer, x[None], whole.positions)
    expected, sure = moe.called(layer.experts, lambda: layer(x[None], **embeddings))
    expected = expected[0].float()
    errors = []
    for run in (mine.run, mine.run_plain):
        found = x.to(torch.float32, copy=True)
        for start, end in chunks:
            packed = pack([Row([0] * (end - start), start, table)], _TRIAL_BLOCK, weight.device)
            trial.context = packed.context
            run(range(index, index + 1), found[start:end], packed.positions)
        errors.append((found - expected)[sure].norm() / expected[sure].norm())
    layer.paged = served
    return float(torch.stack(errors).max())  # NaN stays NaN
