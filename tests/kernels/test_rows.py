"""The inputs of a decode step against Python loops; the Triton kernels run in the interpreter."""

from __future__ import annotations

import pytest
import torch
from guarded import Guarded
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import dispatch
from kernels.arguments.batch import DeviceRows, StepInputs
from kernels.triton.rows import select, select_advance, specimens

CPU = torch.device("cpu")
TWIN = dispatch.choose(CPU)
TRITON = dispatch.choose(CPU, {"input_prep", "advance_rows"})
BOTH = pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
BLOCK_SIZE = 4
INT32, INT64 = torch.int32, torch.int64


class Device:
    """Rows with random blocks, and poisoned buffers for a step."""

    def __init__(self, positions: list[int], bucket: int, max_blocks: int = 5, index: torch.dtype = INT64) -> None:
        self.rows = DeviceRows(
            torch.arange(100, 100 + len(positions), dtype=index),
            torch.tensor(positions, dtype=INT32),
            torch.randint(1, 1000, (len(positions), max_blocks), dtype=INT32),
        )
        shapes = [((bucket,), index)] * 2 + [((bucket,), INT32)] * 2
        self._guards = [Guarded(*shape) for shape in (*shapes, ((bucket, max_blocks), INT32))]
        self.inputs = StepInputs(*(guard.tensor for guard in self._guards))

    def prepare(self, ops: dispatch.Ops, active: list[int]) -> None:
        ops.input_prep(self.inputs, self.rows, torch.tensor(active, dtype=INT32), BLOCK_SIZE)
        for guard in self._guards:
            guard.check()


@BOTH
@pytest.mark.parametrize("index", [INT32, INT64], ids=str)
def test_rows_are_prepared_and_padding_is_empty(ops, index):
    positions = [0, 3, 4, 7, 8, 19]
    device = Device(positions, 8, index=index)
    active = [5, 0, -1, 3, 2, 1, -1, 4]
    device.prepare(ops, active)
    for place, row in enumerate(active):
        found = [
            int(tensor[place]) for tensor in (device.inputs.token_ids, device.inputs.positions, device.inputs.seq_lens)
        ]
        slot, table = int(device.inputs.slots[place]), device.inputs.block_table[place]
        if row < 0:
            assert (found, slot, table.tolist()) == ([0, 0, 0], -1, [0] * 5)
            continue
        position, own = positions[row], device.rows.block_table[row]
        assert found == [100 + row, position, position + 1]
        block, offset = divmod(position, BLOCK_SIZE)
        assert slot == int(own[block]) * BLOCK_SIZE + offset
        assert torch.equal(table, own)


@BOTH
@pytest.mark.parametrize("max_blocks", [1, 1023, 1024, 1025])
def test_a_table_wider_than_one_program_is_whole(ops, max_blocks):
    device = Device([0, BLOCK_SIZE * max_blocks - 1], 2, max_blocks)
    device.prepare(ops, [1, -1])
    assert torch.equal(device.inputs.block_table[0], device.rows.block_table[1])
    assert not bool(device.inputs.block_table[1].any())
    last = int(device.rows.block_table[1, -1])
    assert device.inputs.slots.tolist() == [last * BLOCK_SIZE + BLOCK_SIZE - 1, -1]


@BOTH
@pytest.mark.parametrize("bucket", [1, 127, 128, 129])
def test_drawn_tokens_go_back_to_active_rows_only(ops, bucket):
    device = Device([7] * 200, bucket)
    active = torch.randperm(200)[:bucket].to(INT32)
    active[bucket // 2] = -1 if bucket > 1 else active[0]
    tokens = torch.arange(1000, 1000 + bucket)
    ops.advance_rows(device.rows, active, tokens)
    expected = {row: (100 + row, 7) for row in range(200)}
    for row, token in zip(active.tolist(), tokens.tolist(), strict=True):
        if row >= 0:
            expected[row] = (token, 8)
    pairs = zip(device.rows.last_tokens.tolist(), device.rows.positions.tolist(), strict=True)
    assert dict(enumerate(pairs)) == expected


@BOTH
def test_two_steps_in_a_row_see_each_others_tokens(ops):
    device, active = Device([3, 5], 2), [1, 0]
    for step in range(3):
        device.prepare(ops, active)
        assert device.inputs.positions.tolist() == [5 + step, 3 + step]
        if step:
            assert device.inputs.token_ids.tolist() == [step * 10, step * 10 + 1]
        drawn = torch.tensor([(step + 1) * 10, (step + 1) * 10 + 1])
        ops.advance_rows(device.rows, torch.tensor(active, dtype=INT32), drawn)


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_drawn_rows(data):
    positions = data.draw(st.lists(st.integers(0, 19), min_size=1, max_size=6))
    order = data.draw(st.permutations(range(len(positions))))
    active = data.draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
    chosen = [row if keep else -1 for row, keep in zip(order, active, strict=True)]
    device, other = Device(positions, len(chosen)), Device(positions, len(chosen))
    other.rows.block_table.copy_(device.rows.block_table)
    device.prepare(TWIN, chosen)
    other.prepare(TRITON, chosen)
    for name in vars(device.inputs):
        assert torch.equal(getattr(device.inputs, name), getattr(other.inputs, name)), name


def test_every_configuration_is_compiled_ahead():
    for capability in (80, 90):
        compiled = {(s.constants["BLOCK"], s.num_warps) for s in specimens(capability)}
        for config in (select(capability), select_advance(capability)):
            assert (config.block, config.num_warps) in compiled
