"""Compiled copies of whole blocks equal plain indexing, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernels import dispatch

CUDA = torch.device("cuda")
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)


def store(dtype: torch.dtype, lead: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape = (*lead, 2, 8, 16, 128)
    kv = torch.randint(-99, 99, shape, device=CUDA, dtype=torch.int8).to(dtype)
    return kv, torch.randn(shape[:-1], device=CUDA) if dtype.itemsize == 1 else None


@DTYPES
@pytest.mark.parametrize("number", [0, 1, 90])
@pytest.mark.parametrize("on_host", [False, True])
def test_pairs_are_copied_in_all_layers(dtype, number, on_host):
    kv, scales = store(dtype, (5, 200))
    order = torch.randperm(200)[: 2 * number].to("cpu" if on_host else CUDA)
    source, target = order[:number], order[number:]
    expected, expected_scales = kv.clone(), None if scales is None else scales.clone()
    twin = dispatch.choose(CUDA, ())
    twin.block_copy(expected, source, target, expected_scales)
    dispatch.choose(CUDA).block_copy(kv, source, target, scales)
    assert torch.equal(kv, expected)
    assert scales is None or torch.equal(scales, expected_scales)


@DTYPES
def test_blocks_survive_the_way_out_and_back(dtype):
    ops = dispatch.choose(CUDA)
    kv, scales = store(dtype, (5, 200))
    ids = torch.randperm(200, device=CUDA)[:77]
    staging, staging_scales = store(dtype, (77, 5))
    ops.gather_blocks(staging, kv, ids, staging_scales, scales)
    assert torch.equal(staging, kv[:, ids].transpose(0, 1))
    wiped, wiped_scales = torch.zeros_like(kv), None if scales is None else torch.zeros_like(scales)
    ops.scatter_blocks(wiped, staging, ids, wiped_scales, staging_scales)
    assert torch.equal(wiped[:, ids], kv[:, ids])
    assert int(wiped.count_nonzero()) == int(kv[:, ids].count_nonzero())
    assert scales is None or torch.equal(wiped_scales[:, ids], scales[:, ids])


def test_a_store_larger_than_32_bits_of_elements_is_addressed_right():
    kv = torch.empty((3, 24_000, 2, 8, 16, 128), device=CUDA, dtype=torch.bfloat16)  # 4.7 GB
    assert kv.numel() > 2**31
    kv[2, 23_998].normal_()
    kv[2, 23_999] = 0.0
    ids = torch.tensor([23_998, 23_999], device=CUDA)
    dispatch.choose(CUDA).block_copy(kv, ids[:1], ids[1:])
    assert torch.equal(kv[2, 23_999], kv[2, 23_998])
