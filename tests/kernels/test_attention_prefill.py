"""Prefill attention: the twin against float64, the Triton kernel in the interpreter against both."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from chunks import Chunks
from guarded import Guarded, relative_error
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import ahead, dispatch
from kernels.arguments.batch import RowTensors
from kernels.arguments.splits import DecodeWorkspace
from kernels.checks import SUPPORTED_DTYPES, SUPPORTED_HEAD_DIMS
from kernels.reference.quant import LIMITS as QUANTIZED_DTYPES
from kernels.triton.attention import attention_prefill
from kernels.triton.attention.attention_prefill import SHORT_LANES, select

TWIN = dispatch.choose(torch.device("cpu"))
TRITON = dispatch.choose(torch.device("cpu"), {"attention_prefill"})
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SCALE = 0.25

ROWS = {
    "one token, no context": ([1], [0]),
    "around a tile of keys": ([20, 20, 20], [43, 44, 45]),
    "around a tile of lanes": ([63, 64, 65], [0, 0, 0]),
    "long, short and empty": ([33, 0, 2, 17, 1], [70, 9, 64, 0, 5]),
    "one token behind a long prefix": ([1, 2], [300, 255]),
    "around a split": ([1, 1, 3], [254, 255, 256]),
}
FEATURES = {
    "plain": {},
    "window of one": {"window": 1},
    "window within a tile": {"window": 17},
    "window of a tile": {"window": 64},
    "window behind its first tile": {"window": 100},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-2, 3, 2)},
    "everything": {"window": 30, "softcap": 1.5, "sinks": torch.linspace(3, -1, 2)},
}


def run(ops: dispatch.Ops, chunks: Chunks, **how: object) -> torch.Tensor:
    out = Guarded(tuple(chunks.query.shape), chunks.query.dtype)
    ops.attention_prefill(out.tensor, chunks.query, chunks.kv, chunks.batch, SCALE, kv_scales=chunks.kv_scales, **how)
    out.check()
    return out.tensor


@BOTH
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("features", [FEATURES["plain"], FEATURES["everything"]], ids=str)
def test_chunks_of_any_length_attend_as_in_float64(ops, rows, features):
    chunks = Chunks(*rows)
    assert relative_error(run(ops, chunks, **features), chunks.expected(SCALE, **features)) <= 1e-6


@BOTH
@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_each_feature_is_that_of_float64(ops, features):
    chunks = Chunks([40, 3, 19], [25, 140, 0])
    assert relative_error(run(ops, chunks, **features), chunks.expected(SCALE, **features)) <= 1e-6


@BOTH
@pytest.mark.parametrize("window", [0, 300, 513])
def test_a_sink_counts_once_over_several_splits(ops, window):
    chunks, how = Chunks([2], [700]), {"window": window, "sinks": torch.tensor([4.0, 6.0])}
    assert relative_error(run(ops, chunks, **how), chunks.expected(SCALE, **how)) <= 1e-6


@BOTH
@pytest.mark.parametrize("window", [62, 63, 64, 65, 66])
def test_a_window_ends_at_its_edge(ops, window):
    chunks = Chunks([18, 2], [120, 136], group=1)
    found = run(ops, chunks, window=window)
    assert relative_error(found, chunks.expected(SCALE, window=window)) <= 1e-6


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 4), (80, 1), (96, 2), (128, 7), (256, 8)])
def test_heads_of_any_size_and_group(ops, dtype, head_dim, group):
    chunks = Chunks([9, 1], [60, 20], 1, group, head_dim, dtype=dtype)
    found = run(ops, chunks)
    assert relative_error(found, chunks.expected(SCALE)) <= TOLERANCE[dtype]


@BOTH
@pytest.mark.parametrize("block_size", [1, 4, 64, 128])
def test_blocks_smaller_and_larger_than_a_tile(ops, block_size):
    chunks = Chunks([40, 2], [50, 140], kv_heads=2, block_size=block_size)
    assert relative_error(run(ops, chunks), chunks.expected(SCALE)) <= 1e-6


@BOTH
@pytest.mark.parametrize("kv_dtype", sorted(QUANTIZED_DTYPES, key=str), ids=str)
@pytest.mark.parametrize("features", [FEATURES["plain"], FEATURES["everything"]], ids=str)
def test_8_bit_kv_is_read_with_its_scales(ops, kv_dtype, features):
    chunks = Chunks([30, 2], [50, 270], kv_heads=2, group=1, kv_dtype=kv_dtype)
    assert relative_error(run(ops, chunks, **features), chunks.expected(SCALE, **features)) <= 1e-6


@BOTH
def test_large_scores_neither_overflow_nor_vanish(ops):
    chunks = Chunks([24, 2], [50, 300])
    chunks.query *= 3e4
    assert relative_error(run(ops, chunks), chunks.expected(SCALE)) <= 2e-5


@BOTH
def test_a_token_sees_the_nodes_that_its_tree_names(ops):
    chunks = Chunks([64, 5, 9], [20, 70, 0])
    generator = torch.Generator().manual_seed(3)
    tree = []
    for length in chunks.batch.query_lens:
        parents = [-1] + [int(torch.randint(i, (), generator=generator)) for i in range(1, length)]
        nodes: list[int] = []
        for token, parent in enumerate(parents):
            nodes.append((1 << token) | (nodes[parent] if token else 0))
        tree += [node - (1 << 64) if node >> 63 else node for node in nodes]
    bits = torch.tensor(tree)
    found = run(ops, chunks, tree=bits)
    assert relative_error(found, chunks.expected(SCALE, tree=bits)) <= 1e-6
    assert relative_error(found, chunks.expected(SCALE)) > 1e-3


@BOTH
@pytest.mark.parametrize("features", [FEATURES["plain"], FEATURES["everything"]], ids=str)
def test_chunks_of_every_size_give_one_result(ops, features):
    chunks = Chunks([24], [46], group=2)
    whole = run(ops, chunks, **features)
    for size in (1, 7, 17, 23):
        found = torch.full_like(whole, float("nan"))
        for first in range(0, 24, size):
            batch, query = chunks.part(0, first, min(first + size, 24))
            out = found[first : first + size]
            ops.attention_prefill(out, query, chunks.kv, batch, SCALE, **features)
        assert relative_error(found, whole) <= 1e-6


def test_a_row_alone_is_bit_for_bit_that_row_in_any_batch():
    query_lens, context_lens = [40, 3, 17], [30, 270, 0]
    chunks = Chunks(query_lens, context_lens)
    found = run(TRITON, chunks)
    spans = [slice(a, b) for a, b in itertools.pairwise(chunks.batch.starts)]
    for row, span in enumerate(spans):
        alone, query = chunks.part(row, 0, query_lens[row])
        out = torch.full_like(query, float("nan"))
        TRITON.attention_prefill(out, query, chunks.kv, alone, SCALE)
        assert torch.equal(out, found[span])
    order = [2, 0, 1]
    batch = dataclasses.replace(
        chunks.batch,
        query_lens=[query_lens[row] for row in order],
        context_lens=[context_lens[row] for row in order],
        block_tables=[chunks.batch.block_tables[row] for row in order],
    )
    out = torch.full_like(found, float("nan"))
    query = torch.cat([chunks.query[spans[row]] for row in order])
    TRITON.attention_prefill(out, query, chunks.kv, batch, SCALE)
    assert torch.equal(out, torch.cat([found[spans[row]] for row in order]))


def test_queries_are_read_inside_the_product_of_qkv():
    chunks = Chunks([20, 2], [30, 40], kv_heads=2)
    fused = torch.full((22, 8, 32), float("nan"))
    fused[:, :4] = chunks.query
    expected, chunks.query = run(TRITON, chunks), fused[:, :4]
    assert torch.equal(run(TRITON, chunks), expected)


@BOTH
def test_a_padding_row_gets_zeros_and_reads_nothing(ops):
    chunks = Chunks([20, 3, 2, 18], [30, -3, 400, -18])
    assert not chunks.batch.block_tables[1].numel()
    found = run(ops, chunks)
    assert relative_error(found, chunks.expected(SCALE)) <= 1e-6
    assert not found[20:23].any()
    assert not found[25:].any()


@pytest.mark.parametrize("context", [5, 600])
def test_bounds_and_workspace_of_a_bucket_may_be_larger_than_its_rows(context):
    chunks = Chunks([3, 0, 4], [context, 0, 2], kv_heads=2)
    expected, rows = run(TRITON, chunks), chunks.batch.tensors
    given = RowTensors(
        torch.nn.functional.pad(rows.block_table, (0, 7)),
        rows.seq_lens,
        rows.query_starts,
        max_seq_len=10_000,
        max_query_len=8,
    )
    space = DecodeWorkspace.of(4, 4 * 8, 32, 16, torch.device("cpu"))
    for poisoned in (space.sums, space.stats):
        poisoned.fill_(float("nan"))
    chunks.batch = dataclasses.replace(chunks.batch, given=given, workspace=space)
    assert torch.equal(run(TRITON, chunks), expected)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 90)), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 7]),
    st.integers(0, 90),
)
def test_drawn_rows_attend_as_in_float64(rows, group, window):
    chunks = Chunks([q for q, _ in rows], [c for _, c in rows], group=group, head_dim=16)
    found, expected = run(TRITON, chunks, window=window), chunks.expected(SCALE, window=window)
    assert expected.numel() == 0 or relative_error(found, expected) <= 1e-6


def test_what_is_selected_is_compiled_ahead():
    """Over all head sizes, types of query and KV, and both ways, on every capability of the gate."""
    for capability in ahead.CAPABILITIES:
        specimens = [s for s in attention_prefill.specimens(capability) if "ROWS" in s.constants]
        compiled = {(s.constants["ROWS"], s.constants["TOKENS"], s.num_warps, s.num_stages) for s in specimens}
        kinds = [(d, k) for d in SUPPORTED_DTYPES for k in (d, *QUANTIZED_DTYPES)]
        for head_dim, (dtype, kv), short in itertools.product(SUPPORTED_HEAD_DIMS, kinds, (False, True)):
            if kv == torch.float8_e4m3fn and capability < 89:
                with pytest.raises(ValueError, match="float8"):
                    select(capability, head_dim, dtype, kv, short)
                continue
            tiling = dataclasses.astuple(select(capability, head_dim, dtype, kv, short))
            assert tiling in compiled, (capability, head_dim, dtype, kv, short)
        assert len(specimens) < 16


@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": 0.0},
        {"kv_scales": torch.zeros(3, 2, 1, 16)},
        {"sinks": torch.zeros(3)},
        {"tree": torch.zeros(2, dtype=torch.int64), "window": 3},
        {"tree": torch.zeros(2, dtype=torch.int32)},
    ],
)
def test_an_op_refuses_what_its_kernel_does_not_expect(wrong):
    chunks = Chunks([2], [4])
    how = {"scale": 1.0} | wrong
    with pytest.raises(AssertionError):
        TWIN.attention_prefill(chunks.query, chunks.query, chunks.kv, chunks.batch, **how)


def test_eight_tokens_of_four_heads_are_short():
    """A bucket of verification: 8 tokens a row."""
    assert SHORT_LANES == 8 * 4
