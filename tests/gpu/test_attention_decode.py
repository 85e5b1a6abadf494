"""Compiled decode and shared attention against their twins in float32, eagerly and from a captured graph."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from guarded import relative_error
from paged import quantized

from kernels import dispatch
from kernels.arguments.batch import PagedBatch, RowTensors
from kernels.arguments.shared import SharedGroups
from kernels.arguments.splits import DecodeWorkspace, most_splits

CUDA = torch.device("cuda")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
LENS = [1, 15, 16, 17, 63, 64, 65, 129, 255, 256, 257, 1000, 4096, 4097, 8193, 20_000]


class Rows:
    """Random KV in shuffled blocks; blocks that no row reads are NaN."""

    def __init__(
        self,
        lens: list[int],
        heads: int = 32,
        kv_heads: int = 8,
        head_dim: int = 128,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
        shared_blocks: int = 0,
    ) -> None:
        counts = [-(-length // block_size) - shared_blocks for length in lens]
        num_blocks = shared_blocks + sum(counts)
        ids = 1 + torch.randperm(num_blocks, device=CUDA)
        shared, *own = ids.split([shared_blocks, *counts])
        shape = (num_blocks + 1, 2, kv_heads, block_size, head_dim)
        wide = torch.randn(shape, device=CUDA)
        self.kv_scales: torch.Tensor | None = None
        if kv_dtype is None:
            self.kv = wide.to(dtype)
            self.kv[0] = float("nan")
        else:
            _, self.kv, self.kv_scales = quantized(wide.double(), kv_dtype)
            self.kv_scales[0] = float("nan")
        self.query = torch.randn((len(lens), heads, head_dim), device=CUDA).to(dtype)
        tables = [torch.cat((shared, part)) for part in own]
        self.batch = PagedBatch([1] * len(lens), [n - 1 for n in lens], tables, block_size)
        self.scale = head_dim**-0.5

    def exact(self, **how: Any) -> torch.Tensor:
        """The twin in float32."""
        out = torch.empty(self.query.shape, device=CUDA)
        kv = self.kv.float() if self.kv_scales is None else self.kv
        how["kv_scales"] = self.kv_scales
        dispatch.choose(CUDA, ()).attention_decode(out, self.query.float(), kv, self.batch, self.scale, **how)
        return out

    def check(self, **how: Any) -> None:
        out, ops = torch.full_like(self.query, float("nan")), dispatch.choose(CUDA)
        how["kv_scales"] = self.kv_scales
        ops.attention_decode(out, self.query, self.kv, self.batch, self.scale, **how)
        assert relative_error(out, self.exact(**how)) <= TOLERANCE[out.dtype]


def fp8_or_skip(kv_dtype: torch.dtype) -> None:
    if kv_dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the device has no float8")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "features",
    [{}, {"window": 1023}, {"softcap": 30.0}, {"window": 130, "softcap": 20.0, "sinks": torch.linspace(-2, 4, 32)}],
    ids=str,
)
def test_decode_equals_its_twin(dtype: torch.dtype, features: dict[str, Any]) -> None:
    how = {k: v.to(CUDA) if isinstance(v, torch.Tensor) else v for k, v in features.items()}
    Rows(LENS, dtype=dtype).check(**how)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(14, 2, 64, 16), (32, 32, 80, 64), (12, 12, 96, 32), (16, 8, 128, 16), (8, 4, 256, 16), (40, 1, 128, 64)],
)
def test_every_shape_of_a_model(heads: int, kv_heads: int, head_dim: int, block_size: int) -> None:
    Rows([1, 64, 777, 5000], heads, kv_heads, head_dim, block_size).check()


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_kv_of_8_bits(kv_dtype: torch.dtype, head_dim: int) -> None:
    fp8_or_skip(kv_dtype)
    Rows(LENS, head_dim=head_dim, kv_dtype=kv_dtype).check()


def test_log_sum_exp() -> None:
    rows = Rows(LENS)
    found, expected = (torch.empty(rows.query.shape[:2], device=CUDA) for _ in range(2))
    rows.check(lse=found)
    rows.exact(lse=expected)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_row_is_the_same_bit_for_bit_alone_and_in_a_batch() -> None:
    rows, ops = Rows(LENS), dispatch.choose(CUDA)
    together = torch.empty_like(rows.query)
    ops.attention_decode(together, rows.query, rows.kv, rows.batch, rows.scale)
    for row, length in enumerate(LENS):
        batch = PagedBatch([1], [length - 1], [rows.batch.block_tables[row]], 16)
        alone = torch.empty_like(rows.query[:1])
        ops.attention_decode(alone, rows.query[row : row + 1], rows.kv, batch, rows.scale)
        assert torch.equal(alone[0], together[row]), length


def test_a_captured_graph_follows_lengths_and_tables_and_leaves_padding_rows_zero() -> None:
    longest, bucket = 8192, 16
    rows, ops = Rows([8192, 100, 5000, 1]), dispatch.choose(CUDA)
    table = torch.zeros((bucket, longest // 16), dtype=torch.int32, device=CUDA)
    lens = torch.zeros(bucket, dtype=torch.int32, device=CUDA)
    starts = torch.arange(bucket + 1, dtype=torch.int32, device=CUDA)
    space = DecodeWorkspace.of(bucket, 32, 128, most_splits(longest), CUDA)
    batch = PagedBatch([1] * bucket, [-1] * bucket, [], 16, RowTensors(table, lens, starts, longest, 1), space)
    query = torch.randn((bucket, 32, 128), device=CUDA, dtype=torch.bfloat16)
    out = torch.empty_like(query)

    def call() -> None:
        ops.attention_decode(out, query, rows.kv, batch, rows.scale)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for shorter in (0, 99):
        now = [max(1, length - shorter) for length in (8192, 100, 5000, 1)]
        tables = [t[: math.ceil(n / 16)] for t, n in zip(rows.batch.block_tables, now, strict=True)]
        step = replace(rows.batch, context_lens=[n - 1 for n in now], block_tables=tables)
        given = PagedBatch(step.query_lens, step.context_lens, step.block_tables, 16).tensors
        table.zero_()
        table[:4, : given.block_table.shape[1]] = given.block_table
        lens[:4] = given.seq_lens
        query[:4] = rows.query
        out.fill_(float("nan"))
        graph.replay()
        expected = torch.empty_like(rows.query)
        eager = PagedBatch(step.query_lens, step.context_lens, step.block_tables, 16)
        ops.attention_decode(expected, rows.query, rows.kv, eager, rows.scale)
        assert torch.equal(out[:4], expected)
        assert not out[4:].any()


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(32, 128), (14, 64), (16, 256), (8, 80)])
def test_a_shared_prefix_changes_no_result(heads: int, head_dim: int, kv_dtype: torch.dtype | None) -> None:
    """36 rows over 1,040 shared tokens, 5 more rows alone."""
    fp8_or_skip(kv_dtype or torch.int8)
    lens = [1040 + 1 + 7 * row for row in range(36)] + [2000] * 5
    rows = Rows(lens, heads, heads // (7 if heads == 14 else 4), head_dim, kv_dtype=kv_dtype, shared_blocks=65)
    groups = SharedGroups.of(rows.batch, [(list(range(35, -1, -1)), 65)])
    out = torch.full_like(rows.query, float("nan"))
    dispatch.choose(CUDA).attention_shared(
        out, rows.query, rows.kv, rows.batch, groups, rows.scale, kv_scales=rows.kv_scales
    )
    assert relative_error(out, rows.exact()) <= TOLERANCE[out.dtype]
