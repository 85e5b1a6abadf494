"""Plain-torch twins of `kernels.triton.products.moe`: the choice of experts, and the experts themselves.

It knows tokens, experts and their weights. It does not know which model they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from kernels.reference.group_rows import RowGroups

MAX_TOP_K = 8
_MIN_ROWS = 4
"""Least number of rows of a product. A CPU's library sums the products of fewer rows in another order: a token's output
would depend on how many others take its expert."""
_TALL_TILE_FROM = 24
"""Rows per expert from which one tile of 64 is better than several of 16: its padding costs less than reading the
weight several times."""


@dataclass(frozen=True)
class MoeWorkspace:
    """Intermediate tensors of the op `moe`. A pair is a token and one of its experts: pair p belongs to token p //
    top_k."""

    groups: RowGroups
    """Groups of pairs by expert; their `ids` are the chosen experts, `[num_tokens * top_k]`."""
    activated: torch.Tensor
    """`[num_tokens * top_k, inner]`: activated inner values of each pair."""
    products: torch.Tensor
    """`[num_tokens * top_k, hidden]`: output of each pair."""

    @classmethod
    def of(cls, experts: torch.Tensor, x: torch.Tensor, down: torch.Tensor) -> MoeWorkspace:
        num_experts, hidden, inner = down.shape
        ids = experts.view(-1)
        groups = RowGroups.of(ids, num_experts, tile_of(len(ids), num_experts))
        return cls(groups, x.new_empty((len(ids), inner)), x.new_empty((len(ids), hidden)))


def tile_of(num_pairs: int, num_experts: int) -> int:
    """Returns the rows of a tile; they are known without reading the choice of experts."""
    return 64 if num_pairs >= _TALL_TILE_FROM * num_experts else 16


def route_experts(weights: torch.Tensor, experts: torch.Tensor, logits: torch.Tensor, renormalise: bool) -> None:
    """Writes `weights` float32 and `experts` int32, both `[num_tokens, top_k]`: the largest values of softmax(`logits`
    `[num_tokens, num_experts]`) in descending order, the lower expert first among equals. With `renormalise` they sum
    to 1 (always in Mixtral; `norm_topk_prob` in Qwen3-MoE)."""
    top_k = weights.shape[1]
    shares, order = logits.float().softmax(-1).sort(dim=-1, descending=True, stable=True)
    chosen = shares[:, :top_k]
    weights.copy_(chosen / chosen.sum(-1, keepdim=True) if renormalise else chosen)
    experts.copy_(order[:, :top_k])


def moe(
    out: torch.Tensor,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    workspace: MoeWorkspace | None = None,
) -> None:
    """Writes `out` `[num_tokens, hidden]` = Σ over a token's experts of weight · down(silu(gate(x)) · up(x)).

    `gate_up` `[num_experts, 2 · inner, hidden]`, gate first; `down` `[num_experts, hidden, inner]`; `weights` and
    `experts` `[num_tokens, top_k]` as `route_experts` gives them; an expert of -1 adds nothing. The experts of a token
    are summed in float32 in the order of `experts`."""
    products = torch.zeros((*experts.shape, x.shape[1]), dtype=torch.float32, device=x.device)
    for expert in range(len(down)):
        token, choice = (experts == expert).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        rows = F.pad(x[token], (0, 0, 0, max(0, _MIN_ROWS - len(token))))
        gate, up = F.linear(rows, gate_up[expert]).chunk(2, dim=-1)
        found = F.linear(F.silu(gate) * up, down[expert])[: len(token)]
        products[token, choice] = found.float()
    shares = torch.where(experts >= 0, weights, 0.0)
    out.copy_((products * shares[:, :, None]).sum(1))
