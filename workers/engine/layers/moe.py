"""Mixture-of-experts blocks on the kernels' ops: the choice of experts and their products in a few launches.

Knows blocks of transformers by their parts: a router, and experts with stacked weights. Does not know which layer it
is in. A block that does not compute what its replacement does keeps its place, and the log says why. Experts and
routers are not rounded: formats of weights are those of linear layers.
"""

from __future__ import annotations

import logging

import torch
from torch import nn
from torch.nn import functional as F

from kernels.dispatch import Ops
from kernels.reference.moe import MAX_TOP_K

log = logging.getLogger(__name__)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Of the largest output of a block: the rounding of one operation more or less."""
_TOKENS = 8


class MoeBlock(nn.Module):
    """Softmax over all experts, the best of them, and the sum of their outputs. Shares the tensors of the block it
    replaces."""

    def __init__(self, block: nn.Module, ops: Ops) -> None:
        super().__init__()
        router, experts = block.gate, block.experts
        self._router = router.weight.detach()
        self._gate_up, self._down = experts.gate_up_proj.detach(), experts.down_proj.detach()
        self._top_k = router.top_k
        # Mixtral's router has no such setting: it always divides by the sum.
        self._renormalise = bool(getattr(router, "norm_topk_prob", True))
        self._ops = ops

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` in and out."""
        x = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        if len(x) == 0:
            return hidden
        return self.run(x, *self.route(x)).view(hidden.shape)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of `[num_tokens, hidden]`: weights and experts, `[num_tokens, top_k]`."""
        chosen = (len(x), self._top_k)
        weights = torch.empty(chosen, dtype=torch.float32, device=x.device)
        experts = torch.empty(chosen, dtype=torch.int32, device=x.device)
        logits = F.linear(x, self._router)
        self._ops.weights.route_experts(weights, experts, logits, self._renormalise)
        return weights, experts

    def run(self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._ops.weights.moe(out, x, self._gate_up, self._down, weights, experts)
        return out


def install(model: nn.Module, ops: Ops) -> int:
    """Replaces every block that can be; returns how many."""
    number = 0
    for path, block in list(model.named_modules()):
        if not _fits(block):
            continue
        mine = MoeBlock(block, ops)
        if fault := _fault(block, mine):
            log.warning("%s stays transformers' own: %s", path, fault)
            continue
        model.set_submodule(path, mine)
        number += 1
    return number


def stacks_experts(module: nn.Module) -> bool:
    """Whether these are experts as the op wants them: `gate_up_proj` `[num_experts, 2 · inner, hidden]`, gate first,
    and `down_proj` `[num_experts, hidden, inner]`. transformers' experts say so of themselves."""
    return (
        {name for name, _ in module.named_parameters()} == {"gate_up_proj", "down_proj"}
        and getattr(module, "is_concatenated", False)
        and not getattr(module, "is_transposed", True)
    )


def _fits(block: nn.Module) -> bool:
    """By the parts alone; what they compute is `_fault`'s to show."""
    children = dict(block.named_children())
    if children.keys() != {"gate", "experts"} or dict(block.named_parameters(recurse=False)):
        return False
    router, experts = children["gate"], children["experts"]
    return (
        {name for name, _ in router.named_parameters()} == {"weight"}
        and 0 < getattr(router, "top_k", 0) <= MAX_TOP_K
        and stacks_experts(experts)
    )


def _fault(block: nn.Module, mine: MoeBlock) -> str:
    """Why the two are not the same on random tokens. Where scores are equal either choice is right: outputs are
    compared for tokens with the same experts, weights for all."""
    weight = block.gate.weight
    x = torch.randn((_TOKENS, weight.shape[1]), generator=torch.Generator().manual_seed(2))
    x = x.to(weight)
    try:
        _, expected_weights, expected_experts = block.gate(x)
        expected = block(x[None])[0]
    except (TypeError, ValueError, RuntimeError) as error:
        return f"it cannot be called by itself ({error})"
    weights, experts = mine.route(x)
    found, limit = mine.run(x, weights, experts), TOLERANCE[weight.dtype]
    off = (_sorted(weights) - _sorted(expected_weights.float())).abs().max().item()
    if not off <= limit:
        return f"weights of experts are off by {off:.1e}"
    same = (_sorted(experts) == _sorted(expected_experts)).all(-1)
    if same.sum() < _TOKENS // 2:
        return "it takes other experts"
    off = ((found - expected)[same].abs().max() / expected.abs().max()).item()
    return "" if off <= limit else f"off by {off:.1e}"


def _sorted(values: torch.Tensor) -> torch.Tensor:
    return values.sort(dim=-1).values
