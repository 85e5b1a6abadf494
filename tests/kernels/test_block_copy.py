"""Copies of whole blocks: plain indexing is the definition; the Triton kernel runs in the interpreter."""

from __future__ import annotations

import pytest
import torch
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from kernels.triton.block_copy import select, specimens

CPU = torch.device("cpu")
TWIN = dispatch.choose(CPU)
TRITON = dispatch.choose(CPU, {"block_copy", "gather_blocks", "scatter_blocks"})
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]
LAYERS, BLOCKS = 2, 7


class Blocks:
    """`number` blocks of random bytes per layer; staging has the first two dimensions the other way round."""

    def __init__(self, dtype: torch.dtype, number: int = BLOCKS, staging: bool = False, sizes=(2, 4, 16)) -> None:
        heads, block_size, head_dim = sizes
        lead = (number, LAYERS) if staging else (LAYERS, number)
        shape = (*lead, 2, heads, block_size, head_dim)
        self._guarded = Guarded((*shape[:-1], head_dim * dtype.itemsize), torch.uint8)
        if not staging:
            self._guarded.tensor.random_(0, 256)
        self.kv = self._guarded.tensor.view(dtype)
        self._scales = Guarded(shape[:-1], torch.float32) if dtype.itemsize == 1 else None
        self.scales = None
        if self._scales is not None:
            self.scales = self._scales.tensor
            if not staging:
                self.scales.normal_()

    @property
    def bytes(self) -> torch.Tensor:
        return self._guarded.tensor

    def check(self) -> None:
        self._guarded.check()
        if self._scales is not None:
            self._scales.check()


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_are_copied_in_every_layer_and_nothing_else_changes(ops, dtype):
    blocks = Blocks(dtype)
    expected = blocks.bytes.clone()
    scales = None if blocks.scales is None else blocks.scales.clone()
    ops.block_copy(blocks.kv, torch.tensor([5, 1, 5]), torch.tensor([2, 6, 0]), blocks.scales)
    blocks.check()
    for source, target in ((5, 2), (1, 6), (5, 0)):
        expected[:, target] = expected[:, source]
        if scales is not None:
            scales[:, target] = scales[:, source]
    assert torch.equal(blocks.bytes, expected)
    assert scales is None or torch.equal(blocks.scales, scales)


@BOTH
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathered_blocks_come_back_where_they_were(ops, dtype):
    blocks, ids = Blocks(dtype), torch.tensor([6, 0, 3])
    staging = Blocks(dtype, len(ids), staging=True)
    ops.gather_blocks(staging.kv, blocks.kv, ids, staging.scales, blocks.scales)
    staging.check()
    for place, block in enumerate(ids.tolist()):
        assert torch.equal(staging.bytes[place], blocks.bytes[:, block])
        if blocks.scales is not None:
            assert torch.equal(staging.scales[place], blocks.scales[:, block])
    other = Blocks(dtype)
    before = other.bytes.clone()
    ops.scatter_blocks(other.kv, staging.kv, ids, other.scales, staging.scales)
    other.check()
    assert torch.equal(other.bytes[:, ids], blocks.bytes[:, ids])
    rest = [block for block in range(BLOCKS) if block not in ids]
    assert torch.equal(other.bytes[:, rest], before[:, rest])
    assert blocks.scales is None or torch.equal(other.scales[:, ids], blocks.scales[:, ids])


@pytest.mark.parametrize("head_dim", [32, 64, 72])
def test_a_block_of_one_chunk_and_a_block_of_many(head_dim):
    """2,048 words of a layer are one program, one word more is two."""
    results = []
    for ops in (TWIN, TRITON):
        torch.manual_seed(0)
        blocks = Blocks(torch.float32, 3, sizes=(2, 8, head_dim))
        ops.block_copy(blocks.kv, torch.tensor([1]), torch.tensor([2]))
        results.append(blocks.bytes)
    assert torch.equal(*results)


@BOTH
def test_no_blocks_are_copied(ops):
    blocks, none = Blocks(torch.int8), torch.zeros(0, dtype=torch.int64)
    before = blocks.bytes.clone()
    staging = Blocks(torch.int8, 0, staging=True)
    ops.block_copy(blocks.kv, none, none, blocks.scales)
    ops.gather_blocks(staging.kv, blocks.kv, none, staging.scales, blocks.scales)
    ops.scatter_blocks(blocks.kv, staging.kv, none, blocks.scales, staging.scales)
    assert torch.equal(blocks.bytes, before)


@pytest.mark.parametrize(("source", "target"), [([1, 2], [2, 3]), ([1], [1]), ([1, 2], [3, 3])], ids=str)
def test_chains_and_double_targets_are_refused(source, target):
    blocks = Blocks(torch.float32)
    with pytest.raises(AssertionError):
        TWIN.block_copy(blocks.kv, torch.tensor(source), torch.tensor(target))


def test_scattering_one_block_twice_is_refused():
    blocks, staging = Blocks(torch.float32), Blocks(torch.float32, 2, staging=True)
    with pytest.raises(AssertionError):
        TWIN.scatter_blocks(blocks.kv, staging.kv, torch.tensor([4, 4]))


@settings(max_examples=10, deadline=None)
@given(st.permutations(range(BLOCKS)), st.integers(0, 3), st.sampled_from(DTYPES))
def test_any_disjoint_pairs(order, number, dtype):
    blocks = Blocks(dtype)
    source, target = order[:number], order[number : 2 * number]
    expected = blocks.bytes.clone()
    expected[:, target] = expected[:, source]
    ids = (torch.tensor(side, dtype=torch.int64) for side in (source, target))
    TRITON.block_copy(blocks.kv, *ids, blocks.scales)
    assert torch.equal(blocks.bytes, expected)


def test_every_block_size_has_a_configuration_that_is_compiled_ahead():
    for capability in (80, 90):
        compiled = {(s.constants["CHUNK"], s.num_warps) for s in specimens(capability)}
        for num_words in (32, 256, 2047, 2048, 16_384, 262_144):
            config = select(capability, num_words)
            assert (config.chunk, config.num_warps) in compiled
