"""Experts at decode and prefill sizes, Qwen3-30B-A3B and Mixtral-8x7B."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from benchmarks.kernels.case import Case, Prepared
from kernels import dispatch
from kernels.reference.moe import MoeWorkspace

_DTYPE = torch.bfloat16
_MODELS = {"Qwen3-30B-A3B": (128, 8, 2048, 768), "Mixtral-8x7B": (8, 2, 4096, 14336)}
"""Experts, of them chosen, hidden, inner."""


def cases(tiny: bool) -> Iterator[Case]:
    models = {"tiny": (4, 2, 32, 16)} if tiny else _MODELS
    for (name, sizes), num_tokens in itertools.product(models.items(), (3,) if tiny else (1, 16, 64, 4096)):
        yield Case(
            "moe",
            f"tokens {num_tokens}, {name}: {sizes[1]} of {sizes[0]} experts, {sizes[2]} x {sizes[3]}, bf16",
            lambda device, n=num_tokens, s=sizes: _prepare(device, n, *s, tiny),
            in_graph=num_tokens <= 64,
        )


def _prepare(
    device: torch.device, num_tokens: int, num_experts: int, top_k: int, hidden: int, inner: int, tiny: bool
) -> Prepared:
    """One set of weights: larger than the cache, and every call routes other tokens."""
    ops = dispatch.choose(device)
    num_sets = 2 if tiny else 8
    x = torch.randn((num_sets, num_tokens, hidden), device=device, dtype=_DTYPE)
    shape = (num_experts, 2 * inner, hidden)
    gate_up = torch.randn(shape, device=device, dtype=_DTYPE) / hidden**0.5
    down = torch.randn((num_experts, hidden, inner), device=device, dtype=_DTYPE) / inner**0.5
    logits = torch.randn((num_sets, num_tokens, num_experts), device=device)
    weights = torch.empty((num_sets, num_tokens, top_k), device=device)
    experts = torch.empty((num_sets, num_tokens, top_k), device=device, dtype=torch.int32)
    for one in range(num_sets):
        ops.weights.route_experts(weights[one], experts[one], logits[one], True)
    spaces = [MoeWorkspace.of(experts[one], x[one], down) for one in range(num_sets)]
    out = torch.empty_like(x)
    turn = itertools.cycle(range(num_sets))

    def call(one: int) -> None:
        ops.weights.moe(out[one], x[one], gate_up, down, weights[one], experts[one], spaces[one])

    def error() -> float:
        out.fill_(float("nan"))
        call(0)
        tokens = range(0, num_tokens, max(1, num_tokens // 4))
        expected = torch.zeros((len(tokens), hidden), dtype=torch.float64, device=device)
        for place, token in enumerate(tokens):
            for share, expert in zip(weights[0, token], experts[0, token].tolist(), strict=True):
                gate, up = (gate_up[expert].double() @ x[0, token].double()).chunk(2)
                expected[place] += share * (down[expert].double() @ (F.silu(gate) * up))
        difference = (out[0, :: tokens.step].double() - expected).abs().nan_to_num(torch.inf)
        return float(difference.max() / expected.abs().max())

    def grouped_mm() -> None:
        """Tokens sorted by expert, torch's grouped product, and back."""
        one = next(turn)
        ids, order = experts[one].view(-1).sort()
        ends = torch.searchsorted(ids, numbers, right=True).to(torch.int32)
        inner = torch._grouped_mm(x[one][order // top_k], gate_up.transpose(1, 2), offs=ends)
        gate, up = inner.chunk(2, dim=-1)
        products = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
        shares = weights[one].view(-1)[order, None]
        torch.zeros_like(out[one]).index_add_(0, order // top_k, (products * shares).to(_DTYPE))

    numbers = torch.arange(num_experts, device=device, dtype=torch.int32)
    touched = sum(len(one.unique()) for one in experts) / num_sets
    weight_bytes = int(touched * 3 * hidden * inner * 2)
    num_bytes = weight_bytes + 2 * num_tokens * hidden * 2
    flops = 2 * 3 * num_tokens * top_k * hidden * inner
    peers = {"torch._grouped_mm": grouped_mm}
    return Prepared(lambda: call(next(turn)), error, 2e-2, num_bytes, flops, peers)
