"""Rotary embedding and gated activations at decode and prefill sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.nn import functional as F

from benchmarks.kernels.case import Case, Prepared, num_sets, worst
from kernels import dispatch


def cases(tiny: bool) -> Iterator[Case]:
    for num_tokens, width in [(3, 40)] if tiny else [(1, 14_336), (64, 14_336), (16_384, 14_336)]:
        for out in (torch.bfloat16, torch.int8):
            yield Case(
                "silu_mul",
                f"tokens {num_tokens}, width {width}, output {str(out)[6:]}",
                lambda device, n=num_tokens, w=width, out=out: _gate(device, n, w, out, tiny),
                in_graph=num_tokens <= 64,
                bar="6" if num_tokens >= 16_384 else "",
            )
    for num_tokens, heads in [(3, 2)] if tiny else [(64, 32), (16_384, 32)]:
        yield Case(
            "rope",
            f"tokens {num_tokens}, heads {heads} x 128, bf16, in place",
            lambda device, n=num_tokens, h=heads: _rope(device, n, h, tiny),
            in_graph=num_tokens <= 64,
            bar="6" if num_tokens >= 16_384 else "",
        )


def _gate(device: torch.device, num_tokens: int, width: int, dtype: torch.dtype, tiny: bool) -> Prepared:
    ops = dispatch.choose(device)
    moved = num_tokens * width * (4 + dtype.itemsize)
    sets = num_sets(moved, tiny)
    x = torch.randn((sets, num_tokens, 2 * width), device=device, dtype=torch.bfloat16)
    out = torch.zeros((sets, num_tokens, width), device=device, dtype=dtype)
    scales = torch.zeros((sets, num_tokens), device=device) if dtype is torch.int8 else None
    turn = itertools.cycle(range(sets))

    def gate(one: int) -> None:
        ops.silu_mul(out[one], x[one], None if scales is None else scales[one])

    def error() -> float:
        (out if scales is None else scales)[0] = float("nan")
        gate(0)
        values, up = x[0].double().chunk(2, dim=-1)
        found = out[0].double() if scales is None else out[0].double() * scales[0, :, None]
        return worst(found, F.silu(values) * up)

    def torch_chain() -> None:
        values, up = x[next(turn)].chunk(2, dim=-1)
        torch.mul(F.silu(values), up)

    return Prepared(lambda: gate(next(turn)), error, 1e-2, moved, peers={"torch": torch_chain})


def _rope(device: torch.device, num_tokens: int, heads: int, tiny: bool) -> Prepared:
    ops = dispatch.choose(device)
    moved = num_tokens * heads * 128 * 4
    sets = num_sets(moved, tiny)
    x = torch.randn((sets, num_tokens, heads, 128), device=device, dtype=torch.bfloat16)
    angle = torch.randn((4096, 64), device=device)
    table = torch.cat((angle.cos(), angle.sin()), dim=1)
    positions = torch.randint(0, 4096, (num_tokens,), device=device)
    turn = itertools.cycle(range(sets))

    def run() -> None:
        one = next(turn)
        ops.rope(x[one], x[one], table, positions)

    def error() -> float:
        found = torch.full_like(x[0], float("nan"))
        ops.rope(found, x[0], table, positions)
        low, high = x[0].double().chunk(2, dim=-1)
        cos, sin = table[positions].double()[:, None].chunk(2, dim=-1)
        return worst(found, torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))

    return Prepared(run, error, 1e-2, moved)
