"""The compiled decoder layers: against their definition in float64 over paged KV with poisoned slots, and a row alone
against the same row among others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kernels.cpu import compiled

if reason := compiled.refusal():
    pytest.skip(reason, allow_module_level=True)

from kernels.cpu import layers, panels
from kernels.cpu.attention import CHUNK
from kernels.cpu.emit import has_bf16_products
from kernels.cpu.layers import DecoderLayers, LayerWeights
from kernels.reference.pointwise import rotate

HIDDEN, INNER, MAX_POSITIONS = 64, 128, 2048
LENS = [1, 15, 16, 17, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 130]
"""Around blocks, registers and chunks."""
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Of the largest number, by the dtype of KV and weights: keys and values are rounded to it."""


@dataclass
class Case:
    """Rows of these lengths, the new token among them, over layers with random weights."""

    lens: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    num_layers: int = 2
    biased: bool = False
    normed: bool = False
    window: int = 0
    paired: bool = False

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(sum(self.lens) + self.head_dim)
        order = torch.randperm(400 + sum(self.lens), generator=self._random).tolist()
        self.tables = []
        for length in self.lens:
            count = -(-length // self.block_size)
            self.tables.append(torch.tensor([1 + order.pop() % 10_000 for _ in range(count)]))
        num_blocks = 2 + max(int(table.max()) for table in self.tables)
        shape = (num_blocks, 2, self.kv_heads, self.block_size, self.head_dim)
        self.kv = [self._poisoned(shape) for _ in range(self.num_layers)]
        self.weights = [self._layer() for _ in range(self.num_layers)]
        angles = self._normal(MAX_POSITIONS, self.head_dim // 2)
        self.turns = torch.cat((angles.cos(), angles.sin()), dim=1)
        self.states = self._normal(len(self.lens), HIDDEN)
        self.positions = torch.tensor(self.lens) + 2  # not the places: tokens may have been dropped

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random)

    def _poisoned(self, shape: tuple[int, ...]) -> torch.Tensor:
        """What was never written may hold anything."""
        kv = torch.full(shape, float("nan"))
        for table, length in zip(self.tables, self.lens, strict=True):
            for place in range(length - 1):
                slot = kv[table[place // self.block_size], :, :, place % self.block_size]
                slot.copy_(self._normal(*slot.shape))
        return kv.to(self.dtype)

    def _layer(self) -> dict[str, Any]:
        width = self.heads * self.head_dim
        total = width + 2 * self.kv_heads * self.head_dim
        sizes = {"qkv": (total, HIDDEN), "output": (HIDDEN, width), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}  # fmt: skip
        made: dict[str, Any] = {
            name: (self._normal(*size) / size[1] ** 0.5).to(self.dtype)
            for name, size in sizes.items()
        }
        for name, size in sizes.items():
            made[f"{name}_bias"] = self._normal(size[0]) if self.biased else None
        for name in ("norm_before", "norm_behind"):
            made[name] = 1 + self._normal(HIDDEN) / 4
        for name in ("norm_query", "norm_key"):
            made[name] = 1 + self._normal(self.head_dim) / 4 if self.normed else None
        return made

    def _packed(self, layer: dict[str, Any]) -> LayerWeights:
        names = ("qkv", "output", "gate_up", "down")
        tiles = {name: panels.pack(layer[name], self.paired) for name in names}
        eps = {"eps_before": 1e-5, "eps_behind": 1e-6, "eps_heads": 1e-4}
        return LayerWeights(**layer | tiles, **eps, scale=self.head_dim**-0.5, window=self.window)

    def run(self, rows: list[int] | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """States of these rows behind all layers, and what KV is then."""
        rows = list(range(len(self.lens))) if rows is None else rows
        states, kv = self.states[rows], [layer.clone() for layer in self.kv]
        weights = [self._packed(layer) for layer in self.weights]
        assert all(layers.fits(layer, kv[0]) for layer in weights)
        decode = DecoderLayers(weights, self.turns, self.heads)
        places = [self.lens[row] - 1 for row in rows]
        decode(states, self.positions[rows], places, [self.tables[row] for row in rows], kv)
        return states, kv

    def defined(self) -> torch.Tensor:
        found = [self._row(row) for row in range(len(self.lens))]
        return torch.stack(found)

    def _row(self, row: int) -> torch.Tensor:
        x, length, table = self.states[row].double(), self.lens[row], self.tables[row]
        turns = self.turns[self.positions[row]][None].double()
        for layer, kv in zip(self.weights, self.kv, strict=True):
            wide = {k: None if v is None else v.double() for k, v in layer.items()}

            def linear(name: str, x: torch.Tensor, wide: dict[str, Any] = wide) -> torch.Tensor:
                return F.linear(x, wide[name], wide[f"{name}_bias"])

            heads = linear("qkv", F.rms_norm(x, (HIDDEN,), wide["norm_before"], 1e-5))
            heads = heads.view(-1, self.head_dim)
            query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads))
            if self.normed:
                query = F.rms_norm(query, (self.head_dim,), wide["norm_query"], 1e-4)
                key = F.rms_norm(key, (self.head_dim,), wide["norm_key"], 1e-4)
            query, key = (rotate(part[None], turns, False)[0] for part in (query, key))
            old = kv[table].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : length - 1]
            new = torch.stack((key, value))[:, :, None].to(self.dtype).double()
            keys, values = torch.cat((old, new), dim=2)[:, :, -self.window if self.window else 0 :]
            asking = query.view(self.kv_heads, -1, self.head_dim) * self.head_dim**-0.5
            attended = ((asking @ keys.mT).softmax(-1) @ values).flatten()
            x = x + linear("output", attended)
            gate, up = linear("gate_up", F.rms_norm(x, (HIDDEN,), wide["norm_behind"], 1e-6)).chunk(
                2
            )
            x = x + linear("down", F.silu(gate) * up)
        return x


def check(case: Case, limit: float | None = None) -> None:
    found, _ = case.run()
    expected = case.defined()
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= (limit or TOLERANCE[case.dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_every_length_are_those_of_float64(dtype: torch.dtype) -> None:
    check(Case(LENS, dtype=dtype))


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (6, 2), (4, 1), (8, 1), (7, 1)], ids=str)
def test_any_number_of_query_heads_shares_a_kv_head(heads: tuple[int, int]) -> None:
    many, few = heads
    head_dim = 64 if (many + 2 * few) % 2 else 32
    check(Case([1, 30, 600], heads=many, kv_heads=few, head_dim=head_dim))


@pytest.mark.parametrize("head_dim", [16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_head_size(head_dim: int, dtype: torch.dtype) -> None:
    check(Case([3, 33, 65], heads=4, kv_heads=2, head_dim=head_dim, dtype=dtype))


@pytest.mark.parametrize("block_size", [1, 4, 5, 16, 128])
def test_every_block_size(block_size: int) -> None:
    check(Case([1, 63, 64, 65, CHUNK + 3], block_size=block_size))


@pytest.mark.parametrize("window", [1, 12, 65, CHUNK, CHUNK + 7])
def test_a_window_hides_what_lies_before_it(window: int) -> None:
    check(Case(LENS, window=window))


def test_biases_and_norms_of_heads_are_applied() -> None:
    check(Case([5, 70], biased=True))
    check(Case([5, 70], normed=True))
    check(Case([5, 70], biased=True, normed=True, dtype=torch.bfloat16))


@pytest.mark.skipif(not has_bf16_products(), reason="this CPU does not multiply pairs of bfloat16")
def test_products_of_pairs_stay_within_the_rounding_of_their_inputs() -> None:
    check(Case(LENS, dtype=torch.bfloat16, paired=True), 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype, threads: int) -> None:
    case = Case(LENS, dtype=dtype)
    together, kv = case.run()
    torch.set_num_threads(threads)
    for row, length in enumerate(LENS):
        alone, own = case.run([row])
        assert torch.equal(alone[0], together[row]), length
        block, slot = case.tables[row][(length - 1) // 16], (length - 1) % 16
        for mine, theirs in zip(own, kv, strict=True):
            assert torch.equal(mine[block, :, :, slot], theirs[block, :, :, slot])
    torch.set_num_threads(1)


def test_only_the_new_slots_are_written() -> None:
    case = Case([1, 16, 17, 40])
    _, kv = case.run()
    for before, behind in zip(case.kv, kv, strict=True):
        for table, length in zip(case.tables, case.lens, strict=True):
            slot = (int(table[(length - 1) // 16]), slice(None), slice(None), (length - 1) % 16)
            assert behind[slot].isfinite().all()
            before[slot] = behind[slot]
        assert torch.equal(before.nan_to_num(7.0), behind.nan_to_num(7.0))


def test_scores_of_thousands_neither_overflow_nor_vanish() -> None:
    case = Case([40, 600])
    for layer in case.weights:
        layer["qkv"] *= 60.0
    check(case, 1e-4)


def test_many_rows_take_the_same_way() -> None:
    check(Case([1 + 3 * row for row in range(70)], num_layers=1))


def test_what_does_not_fall_on_whole_panels_is_told() -> None:
    case = Case([3])
    weights = case._packed(case.weights[0])
    kv = case.kv[0]
    assert layers.fits(weights, kv)
    assert not layers.fits(weights, kv.to(torch.int8))
    assert not layers.fits(weights, kv[..., :8])
    odd = panels.pack(torch.zeros(96, HIDDEN))
    assert not layers.fits(dataclasses.replace(weights, gate_up=odd), kv)
    narrow = panels.pack(torch.zeros((HIDDEN, INNER), dtype=torch.bfloat16))
    assert not layers.fits(dataclasses.replace(weights, down=narrow), kv)
