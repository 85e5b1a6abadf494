"""The compiled prefill kernel computes what its twin does in float32, at sizes of production and in a graph."""

from __future__ import annotations

import pytest
import torch

from kernels import dispatch
from kernels.arguments.batch import PagedBatch, RowTensors
from kernels.arguments.splits import DecodeWorkspace, most_splits

CUDA = torch.device("cuda")
SCALE = 0.09
FEATURES = [{}, {"window": 100}, {"window": 1024, "softcap": 20.0}, {"sinks": True}]


class Given:
    """Random rows on the device. KV is stored in `kv_dtype`; the twin gets the same values in float32."""

    def __init__(
        self,
        query_lens: list[int],
        context_lens: list[int],
        kv_heads: int = 8,
        group: int = 4,
        head_dim: int = 128,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        torch.manual_seed(sum(query_lens) + head_dim)
        counts = [-(-(q + c) // block_size) for q, c in zip(query_lens, context_lens, strict=True)]
        ids = 1 + torch.randperm(sum(counts), device=CUDA)
        tables = list(ids.split(counts))
        kv = torch.randn(1 + sum(counts), 2, kv_heads, block_size, head_dim, device=CUDA)
        self.kv_scales: torch.Tensor | None = None
        if kv_dtype is None:
            self.kv = kv.to(dtype)
            self.wide_kv = self.kv.float()
        else:
            largest = 127.0 if kv_dtype == torch.int8 else 448.0
            self.kv_scales = kv.abs().amax(-1) / largest
            numbers = kv / self.kv_scales[..., None]
            self.kv = (numbers.round() if kv_dtype == torch.int8 else numbers).to(kv_dtype)
            self.wide_kv = self.kv.float() * self.kv_scales[..., None]
        self.query = torch.randn(sum(query_lens), kv_heads * group, head_dim, device=CUDA, dtype=dtype)
        self.batch = PagedBatch(query_lens, context_lens, tables, block_size)

    def check(self, **how: object) -> None:
        if how.get("sinks"):
            how["sinks"] = torch.linspace(-2, 3, self.query.shape[1], device=CUDA)
        out = torch.full_like(self.query, float("nan"))
        dispatch.choose(CUDA).attention_prefill(
            out, self.query, self.kv, self.batch, SCALE, kv_scales=self.kv_scales, **how
        )
        close(out, self.expected(**how))

    def expected(self, **how: object) -> torch.Tensor:
        wide = torch.empty(self.query.shape, device=CUDA)
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        dispatch.choose(CUDA, ()).attention_prefill(wide, self.query.float(), self.wide_kv, self.batch, SCALE, **how)
        torch.backends.cuda.matmul.allow_tf32 = before
        return wide


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert not found.isnan().any()
    difference = (found.float() - expected).abs().max()
    tolerance = 1e-4 if found.dtype == torch.float32 else 1e-2
    assert difference <= tolerance * expected.abs().max(), float(difference)


@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("block_size", [16, 64])
def test_chunks_of_production_size(features, block_size):
    Given([2048, 1, 513, 0, 8, 63], [0, 4000, 2047, 100, 9000, 65], block_size=block_size).check(**features)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "group"), [(32, 2, 2), (64, 2, 7), (80, 4, 1), (96, 4, 1), (128, 2, 8), (256, 2, 2)]
)
def test_heads_of_any_size_and_group(dtype, head_dim, kv_heads, group):
    Given([300, 3, 130], [0, 700, 1000], kv_heads, group, head_dim, dtype=dtype).check()


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_8_bit_kv(kv_dtype, head_dim):
    if kv_dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no float8 here")
    given = Given([700, 4, 8], [100, 3000, 20], 2, 4, head_dim, kv_dtype=kv_dtype)
    given.check()
    given.check(window=200, softcap=10.0)


def test_a_tree_of_64_nodes():
    given = Given([64, 7], [5000, 300])
    paths = torch.tensor([(1 << (i % 64)) | 1 for i in range(63)] + [-(1 << 63) | 1])
    tree = torch.cat((paths, paths[:7])).to(CUDA)
    given.check(tree=tree)


def test_a_row_alone_is_bit_for_bit_that_row_in_a_batch():
    given = Given([500, 8, 100], [0, 6000, 3000])
    ops, whole = dispatch.choose(CUDA), torch.empty_like(given.query)
    ops.attention_prefill(whole, given.query, given.kv, given.batch, SCALE)
    for row, (start, end) in enumerate(zip(given.batch.starts[:-1], given.batch.starts[1:], strict=True)):
        alone = PagedBatch(
            [end - start], [given.batch.context_lens[row]], [given.batch.block_tables[row]], given.batch.block_size
        )
        out = torch.empty_like(given.query[start:end])
        ops.attention_prefill(out, given.query[start:end], given.kv, alone, SCALE)
        assert torch.equal(out, whole[start:end])


@pytest.mark.parametrize("query_len", [4, 8, 16])
def test_a_captured_verification_reads_the_rows_of_each_step(query_len):
    """16 tokens of four heads are more than short rows have: both ways are captured."""
    rows, longest = 6, 5000
    given = Given([query_len] * rows, [longest - query_len] * rows)
    table = torch.nn.utils.rnn.pad_sequence(given.batch.block_tables, batch_first=True)
    seq_lens = torch.full((rows,), longest, dtype=torch.int32, device=CUDA)
    starts = torch.arange(rows + 1, dtype=torch.int32, device=CUDA) * query_len
    bucket = RowTensors(table.to(torch.int32), seq_lens, starts, longest, query_len)
    heads = 8 * min(32, 4 * query_len)
    space = DecodeWorkspace.of(rows, heads, 128, most_splits(longest), CUDA)
    batch = PagedBatch(
        given.batch.query_lens, given.batch.context_lens, given.batch.block_tables, 16, given=bucket, workspace=space
    )
    ops, out = dispatch.choose(CUDA), torch.empty_like(given.query)
    ops.attention_prefill(out, given.query, given.kv, batch, SCALE)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.attention_prefill(out, given.query, given.kv, batch, SCALE)
    for lens in ([longest] * rows, [4096, 17, query_len, 0, 257, 3000]):
        seq_lens.copy_(torch.tensor(lens))
        out.fill_(float("nan"))
        graph.replay()
        contexts = [length - query_len for length in lens]
        tables = [ids[: -(-length // 16)] for ids, length in zip(given.batch.block_tables, lens, strict=True)]
        given.batch = PagedBatch([query_len] * rows, contexts, tables, 16)
        close(out, given.expected())
        given.batch = PagedBatch(batch.query_lens, batch.context_lens, batch.block_tables, 16)
