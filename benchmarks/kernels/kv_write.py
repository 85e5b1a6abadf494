"""Keys and values into blocks at decode and prefill sizes: as they are, with norm and rotation, in 8 bits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.kernels.case import Case, Prepared, num_sets, worst
from kernels import dispatch
from kernels.arguments.batch import Slots

_EPS, _BLOCK_SIZE, _MAX_POSITIONS = 1e-6, 16, 4096


@dataclass(frozen=True)
class Shape:
    num_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    stored: torch.dtype
    normed: bool = False

    @property
    def kv_bytes(self) -> int:
        values = self.num_tokens * 2 * self.kv_heads
        scales = 4 * values if self.stored.itemsize == 1 else 0
        return values * self.head_dim * self.stored.itemsize + scales

    def __str__(self) -> str:
        heads = f"heads {self.heads}/{self.kv_heads} x {self.head_dim}"
        norm = ", q/k norm" if self.normed else ""
        return f"tokens {self.num_tokens}, {heads}{norm}, KV {str(self.stored)[6:]}"


def cases(tiny: bool) -> Iterator[Case]:
    bf16, int8, fp8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
    shapes = [Shape(n, 32, 8, 128, stored) for n in (1, 64, 16_384) for stored in (bf16, int8)]
    shapes += [Shape(16_384, 32, 8, 128, fp8), Shape(16_384, 16, 8, 128, bf16, normed=True)]
    if tiny:
        shapes = [Shape(5, 4, 2, 32, bf16, normed=True), Shape(3, 2, 1, 32, int8)]
    for shape in shapes:
        for kernel, prepare in (("kv_write", _plain), ("rope_kv_write", _fused)):
            yield Case(
                kernel,
                str(shape),
                lambda device, shape=shape, prepare=prepare: prepare(device, shape, tiny),
                in_graph=shape.num_tokens <= 64,
                bar="6" if shape.num_tokens >= 16_384 else "",
            )


class _Store:
    """KV of a layer, twice as large as the tokens of a step, and shuffled slots for each set of inputs."""

    def __init__(self, device: torch.device, shape: Shape, sets: int) -> None:
        num_blocks = 2 + 2 * shape.num_tokens // _BLOCK_SIZE
        size = (num_blocks, 2, shape.kv_heads, _BLOCK_SIZE, shape.head_dim)
        self.kv = torch.zeros(size, device=device, dtype=shape.stored)
        quantized = shape.stored.itemsize == 1
        self.scales = torch.zeros(size[:-1], device=device) if quantized else None
        self.slots = [
            torch.randperm(num_blocks * _BLOCK_SIZE, device=device)[: shape.num_tokens].int() for _ in range(sets)
        ]

    def poison(self) -> None:
        target = self.kv if self.scales is None else self.scales
        target.fill_(float("nan"))

    def stored(self, one: int) -> torch.Tensor:
        """`[num_tokens, 2, KVH, D]` in float64."""
        slots = self.slots[one].long()
        blocks, offsets = slots // _BLOCK_SIZE, slots % _BLOCK_SIZE
        found = self.kv[blocks, :, :, offsets].double()
        return found if self.scales is None else found * self.scales[blocks, :, :, offsets, None]


def _tolerance(shape: Shape) -> float:
    return {torch.int8: 1e-2, torch.bfloat16: 1e-2}.get(shape.stored, 7e-2)


def _plain(device: torch.device, shape: Shape, tiny: bool) -> Prepared:
    ops = dispatch.choose(device)
    size = (2, shape.num_tokens, shape.kv_heads, shape.head_dim)
    moved = 2 * torch.Size(size).numel() + shape.kv_bytes
    sets = num_sets(moved, tiny)
    pairs = torch.randn((sets, *size), device=device, dtype=torch.bfloat16)
    store = _Store(device, shape, sets)
    turn = itertools.cycle(range(sets))

    def write(one: int) -> None:
        slots = Slots(store.slots[one], _BLOCK_SIZE)
        ops.kv_write(store.kv, pairs[one, 0], pairs[one, 1], slots, store.scales)

    def error() -> float:
        store.poison()
        write(0)
        return worst(store.stored(0), pairs[0].transpose(0, 1).double())

    return Prepared(lambda: write(next(turn)), error, _tolerance(shape), moved)


def _fused(device: torch.device, shape: Shape, tiny: bool) -> Prepared:
    ops = dispatch.choose(device)
    all_heads = shape.heads + 2 * shape.kv_heads
    size = (shape.num_tokens, all_heads * shape.head_dim)
    # everything is read, the queries are written back
    read = size[0] * size[1] * 2
    moved = read + read * shape.heads // all_heads + shape.kv_bytes
    sets = num_sets(moved, tiny)
    qkv = torch.randn((sets, *size), device=device, dtype=torch.bfloat16)
    half = torch.randn(_MAX_POSITIONS, shape.head_dim // 2, device=device)
    table = torch.cat((half.cos(), half.sin()), dim=1)
    positions = torch.randint(0, _MAX_POSITIONS, (shape.num_tokens,), device=device)
    weights = torch.rand((2, shape.head_dim), device=device).bfloat16() + 0.5
    norms = (weights[0], weights[1]) if shape.normed else None
    store = _Store(device, shape, sets)
    turn = itertools.cycle(range(sets))

    def write(one: int, given: torch.Tensor) -> None:
        slots = Slots(store.slots[one], _BLOCK_SIZE)
        ops.rope_kv_write(store.kv, given, table, positions, slots, norms, _EPS, kv_scales=store.scales)

    def run() -> None:
        one = next(turn)
        write(one, qkv[one])

    def error() -> float:
        store.poison()
        turned = qkv[0].clone()
        write(0, turned)
        expected = _expected(qkv[0].view(shape.num_tokens, all_heads, -1), shape, norms)
        rows = table[positions].double()
        expected = _rotated(expected, rows, shape.heads + shape.kv_heads)
        queries = turned.view(shape.num_tokens, all_heads, -1)[:, : shape.heads]
        stored = store.stored(0).flatten(1, 2)
        return max(worst(queries, expected[:, : shape.heads]), worst(stored, expected[:, shape.heads :]))

    return Prepared(run, error, _tolerance(shape), moved)


def _expected(heads: torch.Tensor, shape: Shape, norms: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    wide = heads.double()
    if norms is None:
        return wide
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS)
    normed[:, : shape.heads] *= norms[0].double()
    normed[:, shape.heads :] *= norms[1].double()
    last = shape.heads + shape.kv_heads
    return torch.cat((normed[:, :last], wide[:, last:]), dim=1)


def _rotated(heads: torch.Tensor, rows: torch.Tensor, num_turning: int) -> torch.Tensor:
    cos, sin = rows[:, None].chunk(2, dim=-1)
    low, high = heads[:, :num_turning].chunk(2, dim=-1)
    turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
    return torch.cat((turned, heads[:, num_turning:]), dim=1)
