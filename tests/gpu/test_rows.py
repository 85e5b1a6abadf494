"""The inputs of decode steps from device rows, over replays of one graph."""

from __future__ import annotations

import pytest
import torch
from captured import captured

from kernels import dispatch
from kernels.arguments.batch import DeviceRows, StepInputs

CUDA = torch.device("cuda")
BLOCK_SIZE = 16


def rows_of(num_rows: int, max_blocks: int) -> DeviceRows:
    generator = torch.Generator(CUDA).manual_seed(num_rows)
    how = {"device": CUDA, "generator": generator}
    limit = max_blocks * BLOCK_SIZE - 8
    return DeviceRows(
        torch.randint(0, 50_000, (num_rows,), **how),
        torch.randint(0, limit, (num_rows,), **how).int(),
        torch.randint(1, 9999, (num_rows, max_blocks), **how).int(),
    )


def buffers(bucket: int, max_blocks: int) -> StepInputs:
    long = [torch.full((bucket,), -9, device=CUDA) for _ in range(2)]
    short = [torch.full((bucket,), -9, device=CUDA, dtype=torch.int32) for _ in range(2)]
    table = torch.full((bucket, max_blocks), -9, device=CUDA, dtype=torch.int32)
    return StepInputs(*long, *short, table)


@pytest.mark.parametrize(("bucket", "max_blocks"), [(1, 1), (16, 2048), (256, 1025)])
def test_replayed_steps_follow_the_device_rows(bucket, max_blocks):
    ops, twin = dispatch.choose(CUDA), dispatch.choose(CUDA, ())
    rows, expected_rows = rows_of(300, max_blocks), rows_of(300, max_blocks)
    inputs, expected = buffers(bucket, max_blocks), buffers(bucket, max_blocks)
    active = torch.randperm(300, device=CUDA)[:bucket].int()
    tokens = torch.randint(0, 50_000, (bucket,), device=CUDA)

    def one_step() -> None:
        ops.input_prep(inputs, rows, active, BLOCK_SIZE)
        ops.advance_rows(rows, active, tokens)

    graph = captured(one_step)
    for tensor, own in ((rows.last_tokens, expected_rows.last_tokens), (rows.positions, expected_rows.positions)):
        tensor.copy_(own)  # the warm-up has moved them
    for step in range(4):
        active.copy_(torch.randperm(300, device=CUDA)[:bucket])
        active[step % bucket] = -1
        tokens.copy_(torch.randint(0, 50_000, (bucket,), device=CUDA))
        graph.replay()
        twin.input_prep(expected, expected_rows, active, BLOCK_SIZE)
        twin.advance_rows(expected_rows, active, tokens)
        for name in vars(inputs):
            assert torch.equal(getattr(inputs, name), getattr(expected, name)), name
        assert torch.equal(rows.last_tokens, expected_rows.last_tokens)
        assert torch.equal(rows.positions, expected_rows.positions)
