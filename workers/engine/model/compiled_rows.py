"""Runs rows of a step through the compiled layers (`kernels.cpu`).

It knows the hand-written layers and paged rows. It does not know what else is in the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kernels.arguments.batch import PagedBatch
from workers.engine.layers.linear import PackedLinear, PanelProduct
from workers.engine.layers.moe import MoeBlock
from workers.engine.model.layer_kinds import EXACT_GELU, GELU, norm_bias, norm_eps, norm_weight
from workers.engine.model.llama import LlamaLayer

if TYPE_CHECKING:
    from kernels.cpu.layers import LayerWeights
    from kernels.cpu.panels import Panels


class CompiledRows:
    def __init__(self, layers: Sequence[LlamaLayer], weights: Sequence[LayerWeights]) -> None:
        from kernels.cpu.layers import DecoderLayers  # needs numba

        self._layers = layers
        self._compiled = DecoderLayers(weights, layers[0].num_heads)

    def __call__(
        self, hidden: torch.Tensor, positions: torch.Tensor, batches: Sequence[PagedBatch], layers: range
    ) -> None:
        """Runs layers. `hidden` `[num_tokens, hidden]`, float32, is overwritten with their output; it holds the
        batches' rows one after the other."""
        kv = [self._layers[index].paged.kv[0] for index in layers]
        lens = [number for batch in batches for number in batch.query_lens]
        starts = [0, *accumulate(lens)]
        places = [place for batch in batches for place in batch.context_lens]
        tables = [table for batch in batches for table in batch.block_tables]
        self._compiled(hidden, positions, starts, places, tables, kv, layers.start)


def build(layers: Sequence[LlamaLayer], turns: Mapping[str | None, torch.Tensor]) -> CompiledRows | None:
    """Returns None if a product is not in panels, if sizes are not multiples of whole panels, or if KV has 8 bits.
    `turns` has the table of each type of angles (`fused.rope_table`)."""
    if not all(_in_panels(linear) for layer in layers for linear in layer.linears):
        return None
    from kernels.cpu.layers import alike, fits  # need numba

    weights = [_weights(layer, turns[layer.turns_type]) for layer in layers]
    if not alike(weights) or not all(fits(w, layer.paged.kv[0]) for w, layer in zip(weights, layers, strict=True)):
        return None
    return CompiledRows(layers, weights)


def _in_panels(linear: nn.Module) -> bool:
    plain = isinstance(linear, PackedLinear) and linear.split is None
    return plain and isinstance(linear.product, PanelProduct)


def _weights(layer: LlamaLayer, turns: torch.Tensor) -> LayerWeights:
    from kernels.cpu import pointwise  # needs numba
    from kernels.cpu.layers import LayerWeights

    query, key, eps = layer.qk_norms or (None, None, 0.0)
    before, behind = layer.norms
    attended, fed = layer.added_norms or (None, None)
    plus_one = layer.kind.plus_one
    qkv, output = layer.linears[:2]
    return LayerWeights(
        qkv=_panels(qkv),
        output=_panels(output),
        qkv_bias=_bias(qkv),
        output_bias=_bias(output),
        norm_before=norm_weight(before, plus_one).contiguous(),
        norm_before_bias=norm_bias(before),
        norm_behind=norm_weight(behind, plus_one).contiguous(),
        norm_behind_bias=norm_bias(behind),
        norm_attended=None if attended is None else norm_weight(attended, plus_one).contiguous(),
        norm_fed=None if fed is None else norm_weight(fed, plus_one).contiguous(),
        norm_query=None if query is None else _wide(query),
        norm_key=None if key is None else _wide(key),
        turns=turns,
        eps_before=norm_eps(before),
        eps_behind=norm_eps(behind),
        eps_attended=0.0 if attended is None else norm_eps(attended),
        eps_fed=0.0 if fed is None else norm_eps(fed),
        eps_heads=eps,
        scale=layer.scale,
        window=layer.window,
        softcap=layer.softcap,
        gate={GELU: pointwise.GELU, EXACT_GELU: pointwise.EXACT_GELU}.get(layer.gate, pointwise.SILU),
        gated=layer.kind.is_gated,
        parallel=layer.is_parallel,
        **_feed_weights(layer),
    )


def _feed_weights(layer: LlamaLayer) -> dict[str, Any]:
    """Returns the weights of the part behind attention."""
    if isinstance(layer.experts, MoeBlock):
        experts, packed = layer.experts, layer.experts.packed
        assert packed is not None, "`cpu_pass.build` looks for others"
        weights = {"gate_up": packed.gate_up, "down": packed.down, "router": packed.router}
        how = {"chosen": experts.top_k, "renormalised": experts.renormalises}
        return {**weights, **how, "gate_up_bias": None, "down_bias": None}
    gate_up, down = layer.gate_up, layer.down
    biases = {"gate_up_bias": _bias(gate_up), "down_bias": _bias(down)}
    return {"gate_up": _panels(gate_up), "down": _panels(down), **biases}


def _panels(linear: nn.Module) -> Panels:
    assert isinstance(linear, PackedLinear) and isinstance(linear.product, PanelProduct)
    return linear.product.panels


def _bias(linear: nn.Module) -> torch.Tensor | None:
    assert isinstance(linear, PackedLinear)
    return None if linear.bias is None else _wide(linear.bias)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().float().contiguous()
