"""Decode attention: the twin against float64, the Triton kernel in the interpreter against both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from guarded import Guarded, relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged import Paged
from triton.runtime import interpreter

from kernels import dispatch
from kernels.arguments import splits
from kernels.arguments.batch import PagedBatch, RowTensors
from kernels.checks import SUPPORTED_DTYPES, SUPPORTED_HEAD_DIMS
from kernels.dispatch import Ops
from kernels.triton.attention import attention_decode, attention_tiles

CPU = torch.device("cpu")
TWIN = dispatch.choose(CPU)
TRITON = dispatch.choose(CPU, {"attention_decode"})
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
# The interpreter cuts float32 off where bf16 rounds.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
AROUND_TILES = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129]
FEATURES: list[dict[str, Any]] = [
    {},
    {"window": 1},
    {"window": 65},
    {"softcap": 3.0},
    {"sinks": torch.tensor([-1.0, 2.0])},
    {"window": 20, "softcap": 2.0, "sinks": torch.tensor([3.0, -2.0])},
]


def run(ops: Ops, case: Paged, scale: float, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = (Guarded(case.query.shape, case.query.dtype), Guarded(case.query.shape[:2], torch.float32))
    ops.attention_decode(
        out.tensor, case.query, case.kv, case.batch, scale, kv_scales=case.kv_scales, lse=lse.tensor, **how
    )
    out.check()
    lse.check()
    return out.tensor, lse.tensor


def check(ops: Ops, case: Paged, scale: float = 0.2, factor: float = 1.0, **how: Any) -> torch.Tensor:
    found, lse = run(ops, case, scale, **how)
    expected, expected_lse = case.expected(scale, **how)
    assert relative_error(found, expected) <= factor * TOLERANCE[found.dtype]
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-6, atol=2e-6)
    return found


@BOTH
@pytest.mark.parametrize("features", FEATURES, ids=str)
def test_decode_is_that_of_float64_around_every_tile_and_block(ops: Ops, features: dict[str, Any]) -> None:
    """Rows of length 0 are padding: zeros, and what their sink says."""
    check(ops, Paged(AROUND_TILES), **features)


@BOTH
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_stays_within_its_own_rounding(ops: Ops, dtype: torch.dtype) -> None:
    check(ops, Paged([1, 17, 130, 260], dtype=dtype))


@BOTH
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("features", [FEATURES[0], FEATURES[-1]], ids=str)
def test_kv_of_8_bits_is_read_with_a_scale_per_token_and_head(
    ops: Ops, kv_dtype: torch.dtype, features: dict[str, Any]
) -> None:
    check(ops, Paged([0, 1, 16, 65, 257], kv_dtype=kv_dtype), **features)
    check(ops, Paged([40, 3], 2, 3, 16, dtype=torch.bfloat16, kv_dtype=kv_dtype))


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_every_head_size(head_dim: int) -> None:
    check(TRITON, Paged([3, 33, 65], head_dim=head_dim), head_dim**-0.5)


@BOTH
@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (3, 2), (1, 7), (2, 8), (1, 16), (1, 17), (1, 40)])
def test_any_number_of_query_heads_per_kv_head(ops: Ops, kv_heads: int, group: int) -> None:
    """Above 16 the heads of a KV head fill more than one tile."""
    check(ops, Paged([1, 50], kv_heads, group, 16))


@pytest.mark.parametrize("block_size", [1, 4, 5, 32, 64, 128])
def test_every_block_size(block_size: int) -> None:
    check(TRITON, Paged([1, 63, 64, 65, 129], block_size=block_size))
    check(TRITON, Paged([1, 63, 64, 65, 129], block_size=block_size), window=60)


@pytest.mark.parametrize(
    "lens",
    [
        [255, 256, 257, 511, 512, 513],
        pytest.param([4095, 4096, 4097], marks=pytest.mark.rest),
        pytest.param([8192, 8193], marks=pytest.mark.rest),
    ],
)
def test_splits_of_every_size_sum_to_the_whole(lens: list[int]) -> None:
    check(TRITON, Paged(lens, group=1, head_dim=16))


@pytest.mark.slow
def test_32_thousand_keys_are_summed_in_float32() -> None:
    """In 17 splits, one more than are reduced at once; the last key weighs about as much as all before it."""
    case = Paged([32_769], group=1, head_dim=16, block_size=64)
    case.strengthen(0, 32_768, 110.0)
    found = check(TRITON, case, 0.1, factor=3.0)
    assert found.abs().max() > 0.1


@BOTH
def test_scores_of_ten_thousand_neither_overflow_nor_vanish(ops: Ops) -> None:
    """One key beats all others by more than float32's exponents reach; its value is the result."""
    case = Paged([1, 64, 65, 300], group=2)
    case.query[..., 0], case.kv[:, 0, ..., 0] = 100.0, -100.0
    for row, length in enumerate(case.lens):
        best = length // 2
        case.kv[case.batch.block_tables[row][best // 16], 0, 0, best % 16, 0] = 100.0
    found, lse = run(ops, case, 1.0)
    for row, length in enumerate(case.lens):
        best = length // 2
        value = case.kv[case.batch.block_tables[row][best // 16], 1, 0, best % 16]
        torch.testing.assert_close(found[row], value.expand(2, -1), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(lse, torch.full_like(lse, 1e4), rtol=5e-3, atol=0.0)


def test_queries_and_results_may_lie_head_by_head() -> None:
    """As transformers gives them: `[heads, rows, head_dim]`, seen as `[rows, heads, head_dim]`."""
    case = Paged([5, 70, 0], kv_heads=2)
    expected, _ = run(TRITON, case, 0.2)
    out = Guarded((4, 3, 32), torch.float32)
    turned = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    TRITON.attention_decode(out.tensor.transpose(0, 1), turned, case.kv, case.batch, 0.2)
    out.check()
    assert torch.equal(out.tensor.transpose(0, 1), expected)


def padded(batch: PagedBatch, num_rows: int, max_seq_len: int) -> PagedBatch:
    """As a captured step has it: rows, table and bounds of the whole bucket, one workspace."""
    table = torch.zeros((num_rows, max_seq_len // 16 + 3), dtype=torch.int32)
    given = batch.tensors
    table[: len(given.block_table), : given.block_table.shape[1]] = given.block_table
    lens = torch.zeros(num_rows, dtype=torch.int32)
    lens[: batch.num_rows] = given.seq_lens
    starts = torch.arange(num_rows + 1, dtype=torch.int32)
    space = splits.DecodeWorkspace.of(num_rows, 4, 32, splits.most_splits(max_seq_len), CPU)
    space.sums.fill_(float("nan"))
    space.stats.fill_(float("nan"))
    return PagedBatch(
        [1] * num_rows,
        batch.context_lens + [-1] * (num_rows - batch.num_rows),
        batch.block_tables + [torch.zeros(0, dtype=torch.int64)] * (num_rows - batch.num_rows),
        16,
        RowTensors(table, lens, starts, max_seq_len, 1),
        space,
    )


def test_a_row_is_the_same_bit_for_bit_alone_in_a_batch_and_in_a_bucket() -> None:
    case = Paged([300, 1, 17, 600, 64], kv_heads=2)
    together, _ = run(TRITON, case, 0.2)
    for row, length in enumerate(case.lens):
        batch = PagedBatch([1], [length - 1], [case.batch.block_tables[row]], 16)
        alone = torch.full_like(case.query[:1], float("nan"))
        TRITON.attention_decode(alone, case.query[row : row + 1], case.kv, batch, 0.2)
        assert torch.equal(alone[0], together[row]), length
    bucket = padded(case.batch, 8, 5000)
    query = torch.cat((case.query, torch.full((3, 4, 32), float("nan"))))
    for _ in range(2):  # the second finds the first one's sums in the workspace
        out = Guarded((8, 4, 32), torch.float32)
        TRITON.attention_decode(out.tensor, query, case.kv, bucket, 0.2)
        out.check()
        assert torch.equal(out.tensor[:5], together)
        assert not out.tensor[5:].any()


def test_a_workspace_that_is_too_small_is_refused() -> None:
    case = Paged([300, 20])
    space = splits.DecodeWorkspace.of(2, 2, 32, 1, CPU)
    batch = PagedBatch([1, 1], [299, 19], case.batch.block_tables, 16, workspace=space)
    with pytest.raises(AssertionError):
        TRITON.attention_decode(torch.empty_like(case.query), case.query, case.kv, batch, 0.2)


def test_the_order_of_programs_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run from the last to the first here; on a GPU in any order."""
    case = Paged([300, 0, 17], kv_heads=2)
    expected, _ = run(TRITON, case, 0.2)
    builder, sizes = interpreter.interpreter_builder, []
    set_index, set_size = builder.set_grid_idx, builder.set_grid_dim

    def note(*grid: int) -> None:
        sizes[:] = grid
        set_size(*grid)

    monkeypatch.setattr(builder, "set_grid_dim", note)
    monkeypatch.setattr(
        builder, "set_grid_idx", lambda *index: set_index(*(n - 1 - i for n, i in zip(sizes, index, strict=True)))
    )
    found, _ = run(TRITON, case, 0.2)
    assert sizes, "the interpreter numbers its programs in another way"
    assert torch.equal(found, expected)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lens=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([16, 32, 80]),
    block_size=st.integers(1, 40),
    window=st.integers(0, 160),
    kv_dtype=st.sampled_from([None, torch.int8]),
)
def test_decode_of_drawn_shapes_is_that_of_float64(
    lens: list[int],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int,
    kv_dtype: torch.dtype | None,
) -> None:
    case = Paged(lens, kv_heads, group, head_dim, block_size, kv_dtype=kv_dtype)
    check(TRITON, case, factor=2.0, window=window)


@given(st.integers(1, 300_000), st.integers(0, 300_000))
def test_no_shorter_row_has_more_splits_than_the_bound(longest: int, shorter: int) -> None:
    for number, most in (
        (splits.num_splits, splits.most_splits),
        (splits.num_shared_splits, splits.most_shared_splits),
    ):
        assert number(min(shorter, longest)) <= most(longest)


@given(st.sampled_from([80, 86, 89, 90]), st.sampled_from(sorted(SUPPORTED_HEAD_DIMS)))
def test_every_choice_is_compiled_ahead_and_none_has_float8_before_sm_89(cap: int, head_dim: int) -> None:
    compiled = {
        (s.constants["ROWS"], s.constants["TOKENS"], s.num_warps, s.num_stages)
        for s in attention_decode.specimens(cap)
        if "ROWS" in s.constants
    }
    for query in SUPPORTED_DTYPES:
        for kv in (query, torch.int8, torch.float8_e4m3fn):
            if kv == torch.float8_e4m3fn and cap < 89:
                with pytest.raises(ValueError, match="no float8"):
                    attention_tiles.select(cap, head_dim, query, kv)
                continue
            tiling = attention_tiles.select(cap, head_dim, query, kv)
            assert (tiling.rows, tiling.tokens, tiling.num_warps, tiling.num_stages) in compiled


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_scales": None},
        {"kv_scales": torch.ones(3, 2, 1, 8)},
        {"kv_scales": torch.ones(3, 2, 1, 16, dtype=torch.float16)},
        {"lse": torch.zeros(1, 3)},
        {"sinks": torch.zeros(3)},
    ],
    ids=str,
)
def test_the_op_refuses_scales_and_heads_that_do_not_fit(wrong: dict[str, Any]) -> None:
    kv = torch.zeros(3, 2, 1, 16, 32, dtype=torch.int8)
    batch = PagedBatch([1], [0], [torch.tensor([1])], 16)
    query = torch.zeros(1, 2, 32)
    how = {"kv_scales": torch.ones(3, 2, 1, 16)} | wrong
    with pytest.raises(AssertionError):
        TWIN.attention_decode(torch.empty_like(query), query, kv, batch, 1.0, **how)
