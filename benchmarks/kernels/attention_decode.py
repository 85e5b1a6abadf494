"""Decode attention over blocks: many rows, one row, 8-bit KV, and a prefix that many rows share."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch

from benchmarks.kernels.case import Case, Prepared
from kernels import dispatch
from kernels.arguments.batch import PagedBatch
from kernels.arguments.shared import SharedGroups
from kernels.arguments.splits import DecodeWorkspace, most_splits

_ROTATED_BYTES = 256 << 20
_MOST_BYTES = 5 << 30
"""The most bytes of KV in one case; contiguous peers hold it a second time."""
_QUANTIZED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_GRAPH_TOKENS = 64 * 1024
"""The most tokens in all rows for which a call takes only some tens of microseconds."""


@dataclass(frozen=True)
class Shape:
    lens: tuple[int, ...]
    kv: str = "bf16"
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    shared_len: int = 0
    """Tokens that all rows begin with."""

    def __str__(self) -> str:
        rows, longest = len(self.lens), max(self.lens)
        lens = f"context {longest}" if len(set(self.lens)) == 1 else f"mixed context up to {longest}"
        shared = f", {self.shared_len} of it shared" if self.shared_len else ""
        heads = f"heads {self.heads}/{self.kv_heads} x {self.head_dim}"
        return f"rows {rows}, {lens}{shared}, {heads}, {self.kv}, blocks of {self.block_size}"

    @property
    def token_bytes(self) -> int:
        """K and V of one token."""
        number = 2 if self.kv == "bf16" else 1
        scale = 0 if self.kv == "bf16" else 4
        return 2 * self.kv_heads * (self.head_dim * number + scale)

    @property
    def num_bytes(self) -> int:
        """Each key and value once, queries and results once."""
        tokens = self.shared_len + sum(length - self.shared_len for length in self.lens)
        return tokens * self.token_bytes + 2 * len(self.lens) * self.heads * self.head_dim * 2


def cases(tiny: bool) -> Iterator[Case]:
    for shape, bar in _tiny_shapes() if tiny else _shapes():
        yield Case(
            "attention_shared" if shape.shared_len else "attention_decode",
            str(shape),
            partial(_prepare, shape, tiny),
            in_graph=sum(shape.lens) <= _GRAPH_TOKENS or shape.shared_len > 0,
            bar=bar,
        )


def _tiny_shapes() -> Iterator[tuple[Shape, str]]:
    small = Shape((40, 40), heads=4, kv_heads=2, head_dim=32)
    yield small, ""
    yield replace(small, lens=(17, 50), kv="int8"), ""
    yield replace(small, lens=(40, 40, 40), shared_len=32), ""


def _shapes() -> Iterator[tuple[Shape, str]]:
    yield Shape((4096,) * 32), "1"
    yield Shape((4096,) * 32, block_size=64), "1"
    yield Shape((4096,) * 32, heads=16), "1"
    yield Shape((4096,) * 64, head_dim=64), "1"
    yield Shape(_mixed(64, 8192)), "1"
    yield Shape((32_768,)), "2"
    yield Shape((4096,)), "2"
    for rows, length in itertools.product((1, 8, 32, 128, 256), (512, 2048, 8192, 32_768)):
        shape = Shape((length,) * rows)
        if shape.num_bytes <= _MOST_BYTES:
            yield shape, "3"
    for kv in _QUANTIZED:
        yield Shape((4096,) * 32, kv), "4"
        yield Shape(_mixed(64, 8192), kv), "4"
    for shared_len in (4096, 16_384):
        yield Shape((shared_len + 256,) * 64, shared_len=shared_len), "5"
    yield Shape((512 + 256,) * 8, shared_len=512), "5"


def _mixed(rows: int, longest: int) -> tuple[int, ...]:
    """Lengths as in serving: most are short, a few are long."""
    drawn = random.Random(rows)
    return tuple(min(longest, int(drawn.lognormvariate(7.0, 1.0)) + 1) for _ in range(rows))


@dataclass
class Inputs:
    """Sets of rows over one layer whose blocks are shuffled; `turn` gives the next set."""

    shape: Shape
    device: torch.device
    num_sets: int
    turn: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self.turn = itertools.cycle(range(self.num_sets))
        shape, size = self.shape, self.shape.block_size
        self.scale = shape.head_dim**-0.5
        shared = shape.shared_len // size
        own = [-(-length // size) - shared for length in shape.lens]
        ids = 1 + torch.randperm(self.num_sets * (shared + sum(own)), device=self.device)
        self.batches = [self._batch(part, own) for part in ids.chunk(self.num_sets)]
        kv_shape = (len(ids) + 1, 2, shape.kv_heads, size, shape.head_dim)
        self.kv_scales: torch.Tensor | None = None
        if shape.kv == "bf16":
            self.kv = torch.randn(kv_shape, device=self.device, dtype=torch.bfloat16)
        else:
            numbers = torch.randint(-127, 128, kv_shape, device=self.device, dtype=torch.int8)
            self.kv = numbers.to(torch.bfloat16).to(_QUANTIZED[shape.kv])
            self.kv_scales = torch.rand(kv_shape[:4], device=self.device) / 64 + 1e-3
        query_shape = (self.num_sets, len(shape.lens), shape.heads, shape.head_dim)
        self.query = torch.randn(query_shape, device=self.device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.query)

    def _batch(self, ids: torch.Tensor, own: list[int]) -> PagedBatch:
        shape = self.shape
        shared, *parts = ids.split([len(ids) - sum(own), *own])
        splits = most_splits(max(shape.lens)) + most_splits(max(1, shape.shared_len))
        rows = len(shape.lens)
        batch = PagedBatch(
            [1] * rows,
            [length - 1 for length in shape.lens],
            [torch.cat((shared, part)) for part in parts],
            shape.block_size,
            workspace=DecodeWorkspace.of(rows, shape.heads, shape.head_dim, splits, self.device),
        )
        assert batch.tensors.max_seq_len == max(shape.lens)  # made now, not inside a capture
        return batch

    @cached_property
    def groups(self) -> list[SharedGroups]:
        group = (range(len(self.shape.lens)), self.shape.shared_len // self.shape.block_size)
        return [SharedGroups.of(batch, [group]) for batch in self.batches]

    def contiguous(self, one: int, row: int) -> torch.Tensor:
        """`[2, KVH, tokens, head_dim]` in bf16."""
        blocks = self.batches[one].block_tables[row]
        part = self.kv[blocks].to(torch.bfloat16)
        if self.kv_scales is not None:
            part = (part.float() * self.kv_scales[blocks][..., None]).to(torch.bfloat16)
        return part.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.shape.lens[row]]

    def expected(self, row: int) -> torch.Tensor:
        blocks = self.batches[0].block_tables[row]
        wide = self.kv[blocks].double()
        if self.kv_scales is not None:
            wide = wide * self.kv_scales[blocks].double()[..., None]
        wide = wide.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.shape.lens[row]]
        query = self.query[0, row].double().view(self.shape.kv_heads, -1, self.shape.head_dim)
        weights = (query @ wide[0].transpose(1, 2) * self.scale).softmax(-1)
        return (weights @ wide[1]).flatten(0, 1)


def _prepare(shape: Shape, tiny: bool, device: torch.device) -> Prepared:
    ops = dispatch.choose(device)
    one_set = sum(shape.lens) * shape.token_bytes
    inputs = Inputs(shape, device, 2 if tiny else min(24, max(1, -(-_ROTATED_BYTES // one_set))))

    def plain(one: int, out: torch.Tensor) -> None:
        query, batch = inputs.query[one], inputs.batches[one]
        ops.attention_decode(out, query, inputs.kv, batch, inputs.scale, kv_scales=inputs.kv_scales)

    def shared(one: int, out: torch.Tensor) -> None:
        given = (inputs.query[one], inputs.kv, inputs.batches[one], inputs.groups[one])
        ops.attention_shared(out, *given, inputs.scale, kv_scales=inputs.kv_scales)

    call = shared if shape.shared_len else plain
    if shape.shared_len:
        assert len(inputs.groups) == inputs.num_sets  # made now, not inside a capture

    def rotated(what: Callable[[int, torch.Tensor], None]) -> None:
        one = next(inputs.turn)
        what(one, inputs.out[one])

    def error() -> float:
        found = torch.full_like(inputs.out[0], float("nan"))
        call(0, found)
        rows = sorted({0, len(shape.lens) // 2, len(shape.lens) - 1})
        expected = torch.stack([inputs.expected(row) for row in rows])
        wrong = (found[rows].double() - expected).abs().max() / expected.abs().max()
        return float("inf") if bool(found.isnan().any()) else float(wrong)

    peers = _peers(inputs)
    if shape.shared_len:
        peers["own kernel, nothing shared"] = partial(rotated, plain)
    if shape.kv != "bf16":
        peers["own kernel, bf16"] = _first_made(lambda: _prepare(replace(shape, kv="bf16"), tiny, device).run)
    return Prepared(partial(rotated, call), error, 2e-2, shape.num_bytes, peers=peers)


def _peers(inputs: Inputs) -> dict[str, Callable[[], None]]:
    peers: dict[str, Callable[[], None]] = {}
    if len(set(inputs.shape.lens)) == 1:
        peers["sdpa on contiguous bf16"] = _first_made(partial(_sdpa, inputs))
    if inputs.kv_scales is None:
        peers["flashinfer"] = _first_made(partial(_flashinfer, inputs))
    return peers


def _first_made(make: Callable[[], Callable[[], None]]) -> Callable[[], None]:
    """Returns a call that prepares itself the first time, which is not timed."""
    made: list[Callable[[], None]] = []

    def run() -> None:
        if not made:
            made.append(make())
        made[0]()

    return run


def _sdpa(inputs: Inputs) -> Callable[[], None]:
    """An upper bound: no block table, all rows of one length."""
    rows = range(len(inputs.shape.lens))
    sets = [torch.stack([inputs.contiguous(one, row) for row in rows], dim=1) for one in range(inputs.num_sets)]

    def run() -> None:
        one = next(inputs.turn)
        keys, values = sets[one]
        torch.nn.functional.scaled_dot_product_attention(
            inputs.query[one][:, :, None], keys, values, scale=inputs.scale, enable_gqa=True
        )

    return run


def _flashinfer(inputs: Inputs) -> Callable[[], None]:
    import flashinfer

    shape, size = inputs.shape, inputs.shape.block_size
    counts = [-(-length // size) for length in shape.lens]
    indptr = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)
    last = torch.tensor([(length - 1) % size + 1 for length in shape.lens], dtype=torch.int32)
    wrappers: list[Any] = []
    for batch in inputs.batches:
        indices = torch.cat(batch.block_tables).to(torch.int32)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            torch.zeros(128 << 20, dtype=torch.uint8, device=inputs.device),
            "HND",
            use_cuda_graph=True,
            use_tensor_cores=shape.heads // shape.kv_heads >= 4,
            paged_kv_indptr_buffer=torch.empty_like(indptr, device=inputs.device),
            paged_kv_indices_buffer=torch.empty_like(indices),
            paged_kv_last_page_len_buffer=torch.empty_like(last, device=inputs.device),
        )
        wrapper.plan(
            indptr.to(inputs.device),
            indices,
            last.to(inputs.device),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            size,
            sm_scale=inputs.scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        wrappers.append(wrapper)

    def run() -> None:
        one = next(inputs.turn)
        wrappers[one].run(inputs.query[one], inputs.kv, out=inputs.out[one])

    return run
