"""The compiled decoder layers: against their definition in float64 over paged KV with poisoned slots, a row alone
against the same row among others, and a row of several tokens against as many of one."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kernels.cpu import compiled

if reason := compiled.refusal():
    pytest.skip(reason, allow_module_level=True)

from kernels.cpu import layers, panels, tiles
from kernels.cpu.attention import CHUNK
from kernels.cpu.emit import has_bf16_products
from kernels.cpu.layers import DecoderLayers, LayerWeights
from kernels.cpu.pointwise import EXACT_GELU, GELU, SILU
from kernels.cpu.product import PAIRED, TILED, WIDENED
from kernels.reference.pointwise import rotate

HIDDEN, INNER, MAX_POSITIONS = 64, 128, 2048
GATES = {SILU: F.silu, GELU: lambda x: F.gelu(x, approximate="tanh"), EXACT_GELU: F.gelu}
LENS = [1, 15, 16, 17, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 130]
"""Around blocks, registers and chunks."""
SOME_LENS, SOME = [5, 16, 18, 1, 80, CHUNK + 2, CHUNK + 9, 700], [5, 2, 9, 1, 16, 3, 9, 1]
"""Rows of several tokens, over the borders of blocks and chunks."""
LONG_LENS, LONG = [17, 40, 1, 90, 300, CHUNK + 60, 33], [17, 33, 1, 65, 129, 100, 2]
"""With rows of more than a part."""
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Of the largest number, by the dtype of KV and weights: keys and values are rounded to it."""


@dataclass
class Case:
    """Rows of these lengths, the new tokens among them, over layers with random weights."""

    lens: list[int]
    news: list[int] = field(default_factory=list)
    """New tokens of each row; empty: one of each."""
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    num_layers: int = 2
    biased: bool = False
    normed: bool = False
    window: int = 0
    alternating: bool = False
    """The last layer has no window."""
    softcap: float = 0.0
    gate: int = SILU
    gated: bool = True
    centred: bool = False
    """Norms are LayerNorms."""
    turned: int | None = None
    """Rotated columns of a head; None: all."""
    parallel: bool = False
    experts: int = 0
    chosen: int = 2
    renormalised: bool = True
    normed_behind: bool = False
    """What attention and the gated products add is normed first."""
    kind: int = WIDENED
    """Of products with weights in bfloat16."""

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(sum(self.lens) + self.head_dim)
        counts = [-(-length // self.block_size) for length in self.lens]
        order = torch.randperm(20 + sum(counts), generator=self._random)
        self.news = self.news or [1] * len(self.lens)
        self.tables = list((1 + order)[: sum(counts)].split(counts))
        num_blocks = 2 + max(int(table.max()) for table in self.tables)
        shape = (num_blocks, 2, self.kv_heads, self.block_size, self.head_dim)
        self.kv = [self._poisoned(shape) for _ in range(self.num_layers)]
        self.weights = [self._layer() for _ in range(self.num_layers)]
        self.turns = []
        """Of each layer: they may differ."""
        for _ in range(self.num_layers):
            turned = self.head_dim if self.turned is None else self.turned
            angles = self._normal(MAX_POSITIONS, turned // 2)
            self.turns.append(torch.cat((angles.cos(), angles.sin()), dim=1))
        places = [torch.arange(length - new, length) for length, new in zip(self.lens, self.news, strict=True)]
        self.states = [self._normal(len(of_row), HIDDEN) for of_row in places]
        # Not the places: tokens may have been dropped.
        self.positions = [of_row + 3 for of_row in places]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random)

    def _poisoned(self, shape: tuple[int, ...]) -> torch.Tensor:
        """What was never written may hold anything."""
        kv = torch.full(shape, float("nan"))
        for table, length, new in zip(self.tables, self.lens, self.news, strict=True):
            places = torch.arange(length - new)
            written = self._normal(length - new, 2, self.kv_heads, self.head_dim)
            kv[table[places // self.block_size], :, :, places % self.block_size] = written
        return kv.to(self.dtype)

    def _layer(self) -> dict[str, Any]:
        width = self.heads * self.head_dim
        total = width + 2 * self.kv_heads * self.head_dim
        number = self.experts or 1
        sizes = {
            "qkv": (total, HIDDEN),
            "output": (HIDDEN, width),
            "gate_up": (number * (2 if self.gated else 1) * INNER, HIDDEN),
            "down": (number * HIDDEN, INNER),
        }
        made: dict[str, Any] = {
            name: (self._normal(*size) / size[1] ** 0.5).to(self.dtype) for name, size in sizes.items()
        }
        for name, size in sizes.items():
            made[f"{name}_bias"] = self._normal(size[0]) if self.biased else None
        made["router"] = self._normal(self.experts, HIDDEN).to(self.dtype) if self.experts else None
        for name in ("norm_before", "norm_behind"):
            made[name] = 1 + self._normal(HIDDEN) / 4
            made[f"{name}_bias"] = self._normal(HIDDEN) / 4 if self.centred else None
        for name in ("norm_attended", "norm_fed"):
            made[name] = 1 + self._normal(HIDDEN) / 4 if self.normed_behind else None
        for name in ("norm_query", "norm_key"):
            made[name] = 1 + self._normal(self.head_dim) / 4 if self.normed else None
        return made

    @functools.cached_property
    def _layers(self) -> list[LayerWeights]:
        """The weights as the first call finds them."""
        return [self._packed(index) for index in range(self.num_layers)]

    def _packed(self, index: int) -> LayerWeights:
        layer = self.weights[index]
        names = ("qkv", "output", "gate_up", "down", *(("router",) if self.experts else ()))
        tiles = {name: panels.pack(layer[name], self.kind) for name in names}
        eps = {"eps_before": 1e-5, "eps_behind": 1e-6, "eps_heads": 1e-4, "eps_attended": 1e-3, "eps_fed": 1e-2}
        how = {"scale": self.head_dim**-0.5, "softcap": self.softcap}
        how |= {name: getattr(self, name) for name in ("gate", "gated", "parallel", "renormalised")}
        how["chosen"] = self.chosen if self.experts else 0
        return LayerWeights(**layer | tiles, **eps, **how, window=self.windows[index], turns=self.turns[index])

    @property
    def windows(self) -> list[int]:
        """Of each layer."""
        return [self.window] * (self.num_layers - 1) + [0 if self.alternating else self.window]

    def run(self, rows: list[int] | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """States of these rows behind all layers, and what KV is then."""
        rows = list(range(len(self.lens))) if rows is None else rows
        kv = [layer.clone() for layer in self.kv]
        return self.call([(row, 0, self.news[row]) for row in rows], kv), kv

    def steps(self, row: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """One row, a call for each of its tokens."""
        kv = [layer.clone() for layer in self.kv]
        found = [self.call([(row, new, new + 1)], kv) for new in range(self.news[row])]
        return torch.cat(found), kv

    def call(self, parts: list[tuple[int, int, int]], kv: list[torch.Tensor]) -> torch.Tensor:
        """Of rows, each with some of its new tokens."""
        assert all(layers.fits(layer, kv[0]) for layer in self._layers)
        decode = DecoderLayers(self._layers, self.heads)
        states = torch.cat([self.states[row][first:end] for row, first, end in parts])
        positions = torch.cat([self.positions[row][first:end] for row, first, end in parts])
        starts = [0, *accumulate(end - first for _, first, end in parts)]
        places = [self.lens[row] - self.news[row] + first for row, first, _ in parts]
        tables = [self.tables[row] for row, _, _ in parts]
        decode(states, positions, starts, places, tables, kv)
        return states

    def defined(self) -> torch.Tensor:
        return torch.cat([self._row(row) for row in range(len(self.lens))])

    def _row(self, row: int) -> torch.Tensor:
        x, length, table = self.states[row].double(), self.lens[row], self.tables[row]
        new, places = len(x), torch.arange(length)
        ahead = places - places[length - new :, None]
        for layer, kv, turned, window in zip(self.weights, self.kv, self.turns, self.windows, strict=True):
            turns = turned[self.positions[row]].double()
            hidden = (ahead > 0) | (ahead <= -window if window else False)
            wide = {k: None if v is None else v.double() for k, v in layer.items()}

            def linear(name: str, x: torch.Tensor, wide: dict[str, Any] = wide) -> torch.Tensor:
                return F.linear(x, wide[name], wide[f"{name}_bias"])

            def norm(name: str, x: torch.Tensor, eps: float, wide: dict[str, Any] = wide) -> torch.Tensor:
                if not self.centred:
                    return F.rms_norm(x, (HIDDEN,), wide[name], eps)
                return F.layer_norm(x, (HIDDEN,), wide[name], wide[f"{name}_bias"], eps)

            before = x
            heads = linear("qkv", norm("norm_before", x, 1e-5))
            heads = heads.view(new, -1, self.head_dim)
            sizes = (self.heads, self.kv_heads, self.kv_heads)
            query, key, value = heads.split(sizes, dim=1)
            if self.normed:
                query = F.rms_norm(query, (self.head_dim,), wide["norm_query"], 1e-4)
                key = F.rms_norm(key, (self.head_dim,), wide["norm_key"], 1e-4)
            query, key = (self._rotated(part, turns) for part in (query, key))
            old = kv[table].double().permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : length - new]
            own = torch.stack((key, value)).transpose(1, 2).to(self.dtype).double()
            keys, values = torch.cat((old, own), dim=2)
            asking = query.view(new, self.kv_heads, -1, self.head_dim).transpose(0, 1) * self.head_dim**-0.5
            scores = asking.flatten(1, 2) @ keys.mT  # [kv_heads, new * heads of each, length]
            if self.softcap:
                scores = self.softcap * torch.tanh(scores / self.softcap)
            scores = scores.masked_fill(hidden.repeat_interleave(asking.shape[2], 0), float("-inf"))
            attended = (scores.softmax(-1) @ values).view_as(asking).transpose(0, 1).flatten(1)
            added = linear("output", attended)
            x = x + (F.rms_norm(added, (HIDDEN,), wide["norm_attended"], 1e-3) if self.normed_behind else added)
            if self.experts:
                x = x + self._fed(wide, norm("norm_behind", x, 1e-6))
                continue
            products = linear("gate_up", norm("norm_behind", before if self.parallel else x, 1e-6))
            gate, up = products.chunk(2, dim=-1) if self.gated else (products, 1.0)
            added = linear("down", GATES[self.gate](gate) * up)
            x = x + (F.rms_norm(added, (HIDDEN,), wide["norm_fed"], 1e-2) if self.normed_behind else added)
        return x

    def _fed(self, wide: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        """The experts' outputs, one token after another."""
        gate_up, down = (wide[name].unflatten(0, (self.experts, -1)) for name in ("gate_up", "down"))
        found = []
        for token, scores in zip(x, x @ wide["router"].T, strict=True):
            shares, experts = scores.softmax(-1).topk(self.chosen)
            shares = shares / shares.sum() if self.renormalised else shares
            outputs = []
            for expert in experts:
                gate, up = (gate_up[expert] @ token).chunk(2)
                outputs.append(down[expert] @ (GATES[self.gate](gate) * up))
            found.append(shares @ torch.stack(outputs))
        return torch.stack(found)

    def _rotated(self, heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        size = turns.shape[1]
        turned = rotate(heads[..., :size], turns) if size else heads[..., :0]
        return torch.cat((turned, heads[..., size:]), dim=-1)


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
    check(Case(SOME_LENS, SOME, window=window))
    check(Case(LONG_LENS, LONG, window=window))


def test_biases_and_norms_of_heads_are_applied() -> None:
    check(Case([5, 70], biased=True))
    check(Case([5, 70], normed=True))
    check(Case([5, 70], biased=True, normed=True, dtype=torch.bfloat16))


@pytest.mark.parametrize("softcap", [0.5, 4.0, 50.0])
def test_scores_are_capped(softcap: float) -> None:
    case = Case(LENS, softcap=softcap)
    for layer in case.weights:
        layer["qkv"][: 6 * case.head_dim] *= 4.0  # queries and keys: scores far beyond the smaller caps
    check(case, 4e-6)
    check(Case(LONG_LENS, LONG, softcap=softcap, window=65, alternating=True))


GEMMA: dict[str, Any] = {"softcap": 5.0, "gate": GELU, "normed_behind": True, "normed": True, "alternating": True}
GPT: dict[str, Any] = {
    "gate": EXACT_GELU,
    "gated": False,
    "centred": True,
    "turned": 8,
    "parallel": True,
    "biased": True,
}
"""Everything that a layer may have beside those of Llama, in two families that have nothing of it in common."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", [*GEMMA, "all"])
def test_parts_of_other_families_are_those_of_float64(part: str, dtype: torch.dtype) -> None:
    how = GEMMA if part == "all" else {part: GEMMA[part]}
    check(Case([5, 70, 600], dtype=dtype, window=12, **how), 4 * TOLERANCE[dtype])
    check(Case(LONG_LENS, LONG, dtype=dtype, window=65, **how), 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("part", [*GPT, "all"])
def test_parts_of_layers_like_gpt_are_those_of_float64(part: str, dtype: torch.dtype) -> None:
    how = GPT if part == "all" else {part: GPT[part]}
    check(Case([5, 70, 600], dtype=dtype, window=12, **how), 4 * TOLERANCE[dtype])
    check(Case(LONG_LENS, LONG, dtype=dtype, window=65, **how), 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (4, 2), (8, 8), (40, 3), (128, 8)], ids=str)
def test_experts_are_those_of_float64(experts: int, chosen: int, dtype: torch.dtype) -> None:
    for renormalised in (True, False):
        how = {"experts": experts, "chosen": chosen, "renormalised": renormalised, "dtype": dtype}
        check(Case([5, 90], [1, 21], num_layers=1, **how), 4 * TOLERANCE[dtype])


@pytest.mark.parametrize("way", ["floats", "widened", "paired", "tiled"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_has_the_same_bits_whatever_experts_others_take(way: str, threads: int) -> None:
    dtype = torch.float32 if way == "floats" else torch.bfloat16
    case = Case(LONG_LENS, LONG, dtype=dtype, kind=kind_of(way), experts=12, chosen=3)
    torch.set_num_threads(threads)
    together, _ = case.run()
    torch.set_num_threads(1)
    for row, found in enumerate(together.split(LONG)):
        assert torch.equal(found, case.run([row])[0])
        if LONG[row] < 40:
            assert torch.equal(found, case.steps(row)[0])


@pytest.mark.parametrize("turned", [0, 2, 16, 20, 32, 48, 80])
def test_the_first_columns_of_a_head_are_rotated_alone(turned: int) -> None:
    check(Case([5, 70], head_dim=80, turned=turned))
    check(Case([5, 70], head_dim=80, turned=turned, normed=True))


def test_a_layer_norm_keeps_the_digits_of_rows_with_a_large_mean() -> None:
    case = Case([5, 70], centred=True, num_layers=1)
    case.states = [states + 300.0 for states in case.states]
    check(case)


@pytest.mark.parametrize("way", ["paired", "tiled"])
def test_parts_of_other_families_stay_within_the_rounding_of_inputs(way: str) -> None:
    for lens, news in ((LENS, []), (LONG_LENS, LONG)):
        check(Case(lens, news, dtype=torch.bfloat16, kind=kind_of(way), window=65, **GEMMA), 2e-2)
        check(Case(lens, news, dtype=torch.bfloat16, kind=kind_of(way), window=65, **GPT), 2e-2)


@pytest.mark.parametrize("way", ["paired", "tiled"])
def test_inputs_of_bfloat16_stay_within_their_rounding(way: str) -> None:
    for window in (0, 65):
        check(Case(LENS, dtype=torch.bfloat16, kind=kind_of(way), window=window), 2e-2)
        check(Case(SOME_LENS, SOME, dtype=torch.bfloat16, kind=kind_of(way), window=window), 2e-2)
        check(Case(LONG_LENS, LONG, dtype=torch.bfloat16, kind=kind_of(way), window=window), 2e-2)


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (6, 2), (4, 1), (8, 1), (7, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [32, 64, 80, 128, 256])
def test_attention_in_the_matrix_unit_has_any_heads(heads: tuple[int, int], head_dim: int) -> None:
    many, few = heads
    head_dim = head_dim if (many + 2 * few) * head_dim % 32 == 0 else 2 * head_dim
    shape = {"heads": many, "kv_heads": few, "head_dim": head_dim, "normed": True}
    check(Case([1, 30, 600, 200], [1, 1, 1, 90], dtype=torch.bfloat16, kind=kind_of("tiled"), **shape), 2e-2)


@pytest.mark.parametrize("block_size", [5, 16, 32, 128])
def test_attention_in_the_matrix_unit_has_any_block_size(block_size: int) -> None:
    check(Case(LONG_LENS, LONG, block_size=block_size, dtype=torch.bfloat16, kind=kind_of("tiled")), 2e-2)


def kind_of(way: str) -> int:
    if way == "paired" and not has_bf16_products():
        pytest.skip("this CPU does not multiply pairs of bfloat16")
    if way == "tiled" and not tiles.are_there():
        pytest.skip("this CPU has no matrix unit")
    return {"paired": PAIRED, "tiled": TILED}.get(way, WIDENED)


@pytest.mark.parametrize("way", ["floats", "widened", "paired", "tiled"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_alone_and_among_others(way: str, threads: int) -> None:
    case = Case(LENS, dtype=torch.float32 if way == "floats" else torch.bfloat16, kind=kind_of(way))
    together, kv = case.run()
    torch.set_num_threads(threads)
    for row, length in enumerate(LENS):
        alone, own = case.run([row])
        assert torch.equal(alone[0], together[row]), length
        block, slot = case.tables[row][(length - 1) // 16], (length - 1) % 16
        for mine, theirs in zip(own, kv, strict=True):
            assert torch.equal(mine[block, :, :, slot], theirs[block, :, :, slot])
    torch.set_num_threads(1)


@pytest.mark.parametrize("way", ["floats", "widened", "paired", "tiled"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("window", [0, 12, 130])
@pytest.mark.parametrize(("lens", "news"), [(SOME_LENS, SOME), (LONG_LENS, LONG)], ids=["some", "long"])
def test_tokens_of_a_row_have_the_bits_of_one_after_another(
    way: str, threads: int, window: int, lens: list[int], news: list[int]
) -> None:
    dtype = torch.float32 if way == "floats" else torch.bfloat16
    how = {0: GPT, 12: {"normed": True}, 130: GEMMA}[window]
    case = Case(lens, news, dtype=dtype, window=window, kind=kind_of(way), **how)
    torch.set_num_threads(threads)
    together, kv = case.run()
    torch.set_num_threads(1)
    for row, found in enumerate(together.split(news)):
        alone, own = case.steps(row)
        assert torch.equal(found, alone), lens[row]
        for mine, theirs in zip(own, kv, strict=True):
            assert torch.equal(mine[case.tables[row]].nan_to_num(7.0), theirs[case.tables[row]].nan_to_num(7.0))


@pytest.mark.parametrize("block_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_several_tokens_are_those_of_float64(dtype: torch.dtype, block_size: int) -> None:
    check(Case(SOME_LENS, SOME, dtype=dtype, block_size=block_size, biased=True))
    check(Case(LONG_LENS, LONG, dtype=dtype, block_size=block_size, biased=True))


@pytest.mark.parametrize("more", [3, 50])
def test_only_the_new_slots_are_written(more: int) -> None:
    case = Case([1, 16, 17, 40, 35, 90], [1, 1, 1, 1, 4, more])
    _, kv = case.run()
    for before, behind in zip(case.kv, kv, strict=True):
        for table, length, new in zip(case.tables, case.lens, case.news, strict=True):
            for place in range(length - new, length):
                slot = (int(table[place // 16]), slice(None), slice(None), place % 16)
                assert behind[slot].isfinite().all()
                before[slot] = behind[slot]
        assert torch.equal(before.nan_to_num(7.0), behind.nan_to_num(7.0))


def test_scores_of_thousands_neither_overflow_nor_vanish() -> None:
    case = Case([40, 600])
    for layer in case.weights:
        layer["qkv"] *= 60.0
    check(case, 1e-4)
    case = Case([40, 600], dtype=torch.bfloat16, kind=kind_of("tiled"))
    for layer in case.weights:
        layer["qkv"] *= 60.0
    found, _ = case.run()
    assert found.isfinite().all()


def test_many_rows_take_the_same_way() -> None:
    check(Case([1 + 3 * row for row in range(70)], num_layers=1))


def test_what_does_not_fall_on_whole_panels_is_told() -> None:
    case = Case([3])
    weights = case._packed(0)
    kv = case.kv[0]
    assert layers.fits(weights, kv)
    assert not layers.fits(weights, kv.to(torch.int8))
    assert not layers.fits(weights, kv[..., :8])
    odd = panels.pack(torch.zeros(96, HIDDEN))
    assert not layers.fits(dataclasses.replace(weights, gate_up=odd), kv)
    narrow = panels.pack(torch.zeros((HIDDEN, INNER), dtype=torch.bfloat16))
    assert not layers.fits(dataclasses.replace(weights, down=narrow), kv)
