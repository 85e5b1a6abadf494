"""Attention over a shared prefix: the twin against plain decode and float64, the Triton kernels against both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from guarded import Guarded, relative_error
from paged import Paged
from torch.nn.functional import pad

from kernels import dispatch
from kernels.arguments.batch import PagedBatch
from kernels.arguments.shared import SharedGroups, sharing_pays
from kernels.arguments.splits import DecodeWorkspace
from kernels.checks import SUPPORTED_DTYPES, SUPPORTED_HEAD_DIMS
from kernels.dispatch import Ops
from kernels.reference.attention import merge_states
from kernels.triton.attention import attention_shared

CPU = torch.device("cpu")
TWIN = dispatch.choose(CPU)
TRITON = dispatch.choose(CPU, {"attention_decode", "attention_shared"})
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
PREFIXES = {
    "one user": ([60, 20], [([0], 3)]),
    "all users": ([49, 100, 64, 48], [([0, 1, 2, 3], 3)]),
    "two groups and rows alone": ([70, 3, 300, 90, 0, 259, 64], [([2, 5], 16), ([3, 0], 4)]),
    "nothing of one's own": ([64, 80], [([1, 0], 4)]),
    "more users than a tile has rows": ([17] * 18 + [33] * 18, [(list(range(36)), 1)]),
    "several splits": ([1100, 1030], [([0, 1], 64)]),
}
FEATURES: list[dict[str, Any]] = [{}, {"softcap": 3.0}, {"sinks": torch.tensor([-1.0, 2.0, 0.0, 4.0])}]


def run(ops: Ops, case: Paged, **how: Any) -> torch.Tensor:
    out = Guarded(case.query.shape, case.query.dtype)
    groups = case.groups()
    ops.attention_shared(out.tensor, case.query, case.kv, case.batch, groups, 0.2, kv_scales=case.kv_scales, **how)
    out.check()
    return out.tensor


@BOTH
@pytest.mark.parametrize("name", PREFIXES)
def test_a_shared_prefix_changes_no_result(ops: Ops, name: str) -> None:
    lens, prefixes = PREFIXES[name]
    case = Paged(lens, 1, 2, prefixes=prefixes)
    found = run(ops, case)
    assert relative_error(found, case.expected(0.2)[0]) <= 1e-6
    plain = torch.empty_like(case.query)
    ops.attention_decode(plain, case.query, case.kv, case.batch, 0.2)
    torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_every_feature_of_decode_holds_behind_a_prefix(ops: Ops, features: dict[str, Any], dtype: torch.dtype) -> None:
    case = Paged([80, 150, 65, 9], 2, 2, dtype=dtype, prefixes=[([2, 0, 1], 4)])
    expected = case.expected(0.2, **features)[0]
    assert relative_error(run(ops, case, **features), expected) <= TOLERANCE[dtype]


@BOTH
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_shared_prefix_may_be_of_8_bits(ops: Ops, kv_dtype: torch.dtype) -> None:
    case = Paged([80, 150, 65, 9], 2, 3, kv_dtype=kv_dtype, prefixes=[([2, 0, 1], 4)])
    assert relative_error(run(ops, case), case.expected(0.2)[0]) <= 1e-6


@pytest.mark.parametrize(("group", "head_dim", "block_size"), [(1, 80, 32), (7, 64, 5), (8, 16, 16), (2, 256, 64)])
def test_every_shape(group: int, head_dim: int, block_size: int) -> None:
    """Groups of 7 heads put one row's heads into two tiles."""
    prefix = -(-40 // block_size)
    lens = [prefix * block_size + own for own in (1, 9, 0, 2, 5, 4, 3, 6, 7, 8)]
    case = Paged(lens, 1, group, head_dim, block_size, prefixes=[(list(range(10)), prefix)])
    assert relative_error(run(TRITON, case), case.expected(0.2)[0]) <= 1e-6


def test_a_workspace_is_used_again_whatever_it_holds() -> None:
    case = Paged([70, 300, 259, 64], 1, 2, prefixes=[([1, 2], 16), ([3, 0], 4)])
    expected, given = run(TRITON, case), case.batch
    space = DecodeWorkspace.of(4, 2, 32, 8, CPU)
    lists = (given.query_lens, given.context_lens, given.block_tables, given.block_size)
    batch = PagedBatch(*lists, workspace=space)
    for value in (float("nan"), 1e30):
        space.sums.fill_(value)
        space.stats.fill_(value)
        out = torch.full_like(case.query, float("nan"))
        TRITON.attention_shared(out, case.query, case.kv, batch, case.groups(), 0.2)
        assert torch.equal(out, expected)


def test_empty_groups_and_places_that_fill_a_bucket_change_nothing() -> None:
    """As a captured step has them: more groups, rows in groups and shared blocks than there are this time."""
    case = Paged([70, 300, 259, 64], 1, 2, prefixes=[([1, 2], 16)])
    groups, expected = case.groups(), run(TRITON, case)
    bucket = replace(
        groups,
        order=pad(groups.order, (0, 5)),
        starts=pad(groups.starts, (0, 2), value=2),
        shared_lens=pad(groups.shared_lens, (0, 2)),
        block_table=pad(groups.block_table, (0, 9, 0, 2)),
        max_group_rows=40,
        max_shared_len=2000,
        max_own_len=1000,
    )
    out = torch.full_like(case.query, float("nan"))
    TRITON.attention_shared(out, case.query, case.kv, case.batch, bucket, 0.2)
    assert torch.equal(out, expected)


def test_states_merge_to_attention_over_both_sets_of_keys() -> None:
    scores, values = (torch.randn(2, 3, 9, dtype=torch.float64), torch.randn(9, 4, dtype=torch.float64))

    def state(part: slice) -> tuple[torch.Tensor, torch.Tensor]:
        some = scores[..., part]
        return some.softmax(-1).nan_to_num() @ values[part], some.logsumexp(-1)

    whole, lse = state(slice(0, 9))
    for cut in (0, 4, 9):
        merged, merged_lse = merge_states(*state(slice(0, cut)), *state(slice(cut, 9)))
        torch.testing.assert_close(merged, whole)
        torch.testing.assert_close(merged_lse, lse)
    nothing = state(slice(0, 0))
    merged, merged_lse = merge_states(*nothing, *nothing)
    assert not merged.any()
    assert bool((merged_lse == float("-inf")).all())


def test_sharing_pays_for_long_prefixes_of_many_rows_without_a_window() -> None:
    assert sharing_pays(512, 8)
    assert not sharing_pays(511, 8)
    assert not sharing_pays(512, 7)
    assert not sharing_pays(100_000, 1000, window=4096)


@pytest.mark.parametrize("groups", [[([0], 2), ([0], 2)], [([0], 5)], [([0], 0)]])
def test_a_row_is_in_one_group_and_holds_its_prefix(groups: list[tuple[list[int], int]]) -> None:
    case = Paged([64])
    with pytest.raises(AssertionError):
        SharedGroups.of(case.batch, groups)


@pytest.mark.parametrize("cap", [80, 90])
def test_every_choice_is_compiled_ahead(cap: int) -> None:
    compiled = {
        (s.constants["ROWS"], s.constants["TOKENS"], s.num_warps, s.num_stages) for s in attention_shared.specimens(cap)
    }
    for head_dim in SUPPORTED_HEAD_DIMS:
        for query in SUPPORTED_DTYPES:
            for kv in (query, torch.int8):
                tiling = attention_shared.select(cap, head_dim, query, kv)
                shape = (tiling.rows, tiling.tokens, tiling.num_warps, tiling.num_stages)
                assert shape in compiled, (head_dim, query, kv)
    with pytest.raises(ValueError, match="no float8"):
        attention_shared.select(80, 128, torch.bfloat16, torch.float8_e4m3fn)
