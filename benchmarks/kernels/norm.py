"""RMSNorm with residual at decode and prefill sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from benchmarks.kernels.case import Case, Prepared
from kernels import dispatch

_EPS = 1e-6
_ROTATED_BYTES = 256 << 20


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


def _prepare(device: torch.device, num_tokens: int, hidden: int, tiny: bool) -> Prepared:
    ops = dispatch.choose(device)
    one = num_tokens * hidden * 2
    num_sets = 2 if tiny else min(64, max(2, _ROTATED_BYTES // (3 * one)))
    shape = (num_sets, num_tokens, hidden)
    x, residual = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    weight = torch.randn(hidden, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    turn = itertools.cycle(range(num_sets))

    def run() -> None:
        one = next(turn)
        ops.rms_norm(out[one], x[one], weight, _EPS, residual[one])

    def error() -> float:
        total = (x[0] + residual[0]).double()
        expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + _EPS)
        found = torch.full_like(x[0], float("nan"))
        ops.rms_norm(found, x[0], weight, _EPS, residual[0].clone())
        difference = (found.double() - expected * weight.double()).abs()
        return float(difference.nan_to_num(torch.inf).max() / expected.abs().max())

    def torch_chain() -> None:
        one = next(turn)
        residual[one] += x[one]
        torch.nn.functional.rms_norm(residual[one], (hidden,), weight, _EPS)

    return Prepared(run, error, 2e-2, 4 * one, peers={"torch": torch_chain})
