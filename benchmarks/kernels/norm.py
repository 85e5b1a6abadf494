"""RMSNorm with residual at decode and prefill sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from benchmarks.kernels.case import Case, Prepared, num_sets, worst
from kernels import dispatch

_EPS = 1e-6


def cases(tiny: bool) -> Iterator[Case]:
    sizes = [(5, 48)] if tiny else [(1, 4096), (64, 4096), (16_384, 4096), (16_384, 1024)]
    for num_tokens, hidden in sizes:
        yield Case(
            "rms_norm",
            f"tokens {num_tokens}, hidden {hidden}, residual, bf16",
            lambda device, n=num_tokens, h=hidden: _prepare(device, n, h, tiny),
            in_graph=num_tokens <= 64,
            bar="6" if num_tokens >= 16_384 else "",
        )
    for num_tokens, hidden in [(3, 48)] if tiny else [(16_384, 4096)]:
        yield Case(
            "rms_norm",
            f"tokens {num_tokens}, hidden {hidden}, int8 output",
            lambda device, n=num_tokens, h=hidden: _prepare_int8(device, n, h, tiny),
            bar="6" if not tiny else "",
        )


def _prepare(device: torch.device, num_tokens: int, hidden: int, tiny: bool) -> Prepared:
    ops = dispatch.choose(device)
    one = num_tokens * hidden * 2
    sets = num_sets(3 * one, tiny)
    shape = (sets, num_tokens, hidden)
    x, residual = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(hidden, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    turn = itertools.cycle(range(sets))

    def run() -> None:
        one = next(turn)
        ops.rms_norm(out[one], x[one], weight, _EPS, residual[one])

    def error() -> float:
        total = (x[0] + residual[0]).double()
        expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + _EPS)
        found = torch.full_like(x[0], float("nan"))
        ops.rms_norm(found, x[0], weight, _EPS, residual[0].clone())
        return worst(found, expected * weight.double())

    def torch_chain() -> None:
        one = next(turn)
        residual[one] += x[one]
        torch.nn.functional.rms_norm(residual[one], (hidden,), weight, _EPS)

    return Prepared(run, error, 2e-2, 4 * one, peers={"torch": torch_chain})


def _prepare_int8(device: torch.device, num_tokens: int, hidden: int, tiny: bool) -> Prepared:
    ops = dispatch.choose(device)
    moved = num_tokens * (hidden * 3 + 4)
    sets = num_sets(moved, tiny)
    x = torch.randn((sets, num_tokens, hidden), device=device, dtype=torch.bfloat16)
    weight = torch.randn(hidden, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x, dtype=torch.int8)
    scales = torch.empty((sets, num_tokens), device=device)
    turn = itertools.cycle(range(sets))

    def run() -> None:
        one = next(turn)
        ops.rms_norm(out[one], x[one], weight, _EPS, out_scales=scales[one])

    def error() -> float:
        scales[0] = float("nan")
        ops.rms_norm(out[0], x[0], weight, _EPS, out_scales=scales[0])
        wide = x[0].double()
        expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS) * weight.double()
        return worst(out[0].double() * scales[0, :, None].double(), expected)

    return Prepared(run, error, 1e-2, moved)
