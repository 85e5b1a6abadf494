"""Ops on weights: products with plain and quantized weights, experts, adapters. They are checked here and chosen in
`dispatch`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kernels import checks
from kernels.reference import linear, lora, moe
from kernels.reference.group_rows import RowGroups
from kernels.reference.moe import MoeWorkspace

Kernel = Callable[..., Any]


@dataclass(frozen=True)
class WeightOps:
    chosen: dict[str, Kernel]

    def group_rows(self, groups: RowGroups) -> None:
        assert groups.ids.dim() == 1 and len(groups.ids) > 0, groups.ids.shape
        tensors = (groups.ids, groups.rows, groups.tiles, groups.counts)
        assert all(t.dtype == torch.int32 and t.is_contiguous() for t in tensors)
        assert groups.tile & (groups.tile - 1) == 0, groups.tile
        assert len(groups.rows) == len(groups.tiles) * groups.tile, groups.rows.shape
        self.chosen["group_rows"](groups)

    def linear_fp8(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        _check_linear(out, x, weight.shape[0], weight.shape[1], bias, workspace)
        assert x.dtype == weight.dtype == torch.float8_e4m3fn, (x.dtype, weight.dtype)
        assert weight.is_contiguous(), weight.stride()
        assert weight.shape[0] % 16 == weight.shape[1] % 16 == 0, weight.shape  # the library's rule
        assert x_scale.shape == x.shape[:1] and scale.shape == weight.shape[:1], scale.shape
        assert x_scale.dtype == scale.dtype == torch.float32, (x_scale.dtype, scale.dtype)
        self.chosen["linear_fp8"](out, x, x_scale, weight, scale, bias, workspace)

    def linear_w4(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        zero: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        in_features, out_features = x.shape[1], weight.shape[1]
        _check_linear(out, x, out_features, in_features, bias, workspace)
        assert 32 * len(weight) in (4 * in_features, 8 * in_features), (weight.shape, x.shape)
        zeros = torch.int8 if 8 * len(weight) == in_features else torch.uint8
        assert weight.dtype == torch.int32 and weight.is_contiguous(), weight.dtype
        assert in_features // len(scale) in linear.GROUPS, (weight.shape, scale.shape)
        assert scale.shape == (len(scale), out_features) and scale.is_contiguous(), scale.shape
        assert in_features % len(scale) == 0, (weight.shape, scale.shape)
        assert zero is None or (zero.shape == scale.shape and zero.dtype == zeros)
        assert order is None or (order.shape == (in_features,) and order.dtype == torch.int32)
        self.chosen["linear_w4"](out, x, weight, scale, zero, order, bias, workspace)

    def linear_w8(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        _check_linear(out, x, weight.shape[0], weight.shape[1], bias, workspace)
        assert weight.dtype == torch.int8 and weight.is_contiguous(), weight.dtype
        assert scale.shape == weight.shape[:1], (scale.shape, weight.shape)
        self.chosen["linear_w8"](out, x, weight, scale, bias, workspace)

    def linear_w8a8(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        x_scale: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        workspace: torch.Tensor | None = None,
    ) -> None:
        _check_linear(out, x, weight.shape[0], weight.shape[1], bias, workspace)
        assert x.dtype == weight.dtype == torch.int8, (x.dtype, weight.dtype)
        assert weight.is_contiguous(), weight.stride()
        assert weight.shape[0] % 8 == weight.shape[1] % 8 == 0, weight.shape  # the library's rule
        assert x_scale.shape == x.shape[:1] and scale.shape == weight.shape[:1], scale.shape
        assert x_scale.dtype == scale.dtype == torch.float32, (x_scale.dtype, scale.dtype)
        self.chosen["linear_w8a8"](out, x, x_scale, weight, scale, bias, workspace)

    def lora(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        shrink: torch.Tensor,
        expand: torch.Tensor,
        groups: RowGroups,
        part_ends: tuple[int, ...],
        workspace: torch.Tensor | None = None,
    ) -> None:
        num_adapters, parts, rank, in_features = shrink.shape
        _check_linear(out, x, out.shape[1], in_features)
        assert shrink.is_contiguous() and expand.is_contiguous(), shrink.stride()
        assert expand.shape == (num_adapters, out.shape[1], rank), (expand.shape, shrink.shape)
        assert x.dtype == out.dtype == shrink.dtype == expand.dtype, shrink.dtype
        assert rank <= lora.MAX_RANK and parts == len(part_ends) <= lora.MAX_PARTS, shrink.shape
        assert part_ends[-1] == out.shape[1], (part_ends, out.shape)
        assert all(end % 16 == 0 for end in part_ends[:-1]), part_ends
        assert groups.tile == lora.TILE and len(groups.ids) == len(x), groups.ids.shape
        size = lora.workspace_size(len(x), parts, rank)
        assert workspace is None or workspace.numel() >= size, size
        self.chosen["lora"](out, x, shrink, expand, groups, part_ends, workspace)

    def moe(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        workspace: MoeWorkspace | None = None,
    ) -> None:
        num_experts, hidden, inner = down.shape
        _check_linear(out, x, hidden, hidden)
        assert gate_up.shape == (num_experts, 2 * inner, hidden), (gate_up.shape, down.shape)
        assert gate_up.is_contiguous() and down.is_contiguous(), gate_up.stride()
        assert x.dtype == out.dtype == gate_up.dtype == down.dtype, gate_up.dtype
        assert weights.shape == experts.shape == (len(x), experts.shape[1]), experts.shape
        assert experts.shape[1] <= moe.MAX_TOP_K, experts.shape
        assert weights.dtype == torch.float32 and experts.dtype == torch.int32, weights.dtype
        assert weights.is_contiguous() and experts.is_contiguous(), weights.stride()
        if workspace is not None:
            assert workspace.groups.ids.data_ptr() == experts.data_ptr(), "other experts"
        self.chosen["moe"](out, x, gate_up, down, weights, experts, workspace)

    def quantize_tokens(self, out: torch.Tensor, scale: torch.Tensor, x: torch.Tensor) -> None:
        assert x.dim() == 2 and x.is_contiguous() and out.is_contiguous(), x.stride()
        assert out.shape == x.shape and out.dtype in (torch.float8_e4m3fn, torch.int8), out.dtype
        assert scale.shape == x.shape[:1] and scale.dtype == torch.float32, scale.shape
        self.chosen["quantize_tokens"](out, scale, x)

    def route_experts(
        self, weights: torch.Tensor, experts: torch.Tensor, logits: torch.Tensor, renormalise: bool
    ) -> None:
        num_tokens, num_experts = logits.shape
        assert weights.shape == experts.shape == (num_tokens, experts.shape[1]), experts.shape
        assert experts.shape[1] <= min(moe.MAX_TOP_K, num_experts), (experts.shape, logits.shape)
        assert weights.dtype == torch.float32 and experts.dtype == torch.int32, weights.dtype
        assert logits.is_contiguous() and weights.is_contiguous() and experts.is_contiguous()
        self.chosen["route_experts"](weights, experts, logits, renormalise)


def _check_linear(
    out: torch.Tensor,
    x: torch.Tensor,
    out_features: int,
    in_features: int,
    bias: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> None:
    assert x.dim() == 2 and x.shape[1] == in_features, (x.shape, in_features)
    assert len(x) > 0, x.shape
    assert out.shape == (len(x), out_features), (out.shape, x.shape, out_features)
    assert x.is_contiguous() and out.is_contiguous(), (x.stride(), out.stride())
    assert out.dtype in checks.SUPPORTED_DTYPES, out.dtype
    assert bias is None or bias.shape == (out_features,), bias
    _check_workspace(workspace, out, out_features, in_features)


def _check_workspace(workspace: torch.Tensor | None, out: torch.Tensor, out_features: int, in_features: int) -> None:
    if workspace is None:
        return
    size = linear.workspace_size(len(out), out_features, in_features, out.dtype)
    assert workspace.dtype == torch.float32, workspace.dtype
    assert workspace.dim() == 1 and len(workspace) >= size, (workspace.shape, size)
