"""The inputs of a decode step: a launch of microseconds, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.kernels.case import Case, Prepared
from kernels import dispatch
from kernels.arguments.batch import DeviceRows, StepInputs

_BLOCK_SIZE = 16


def cases(tiny: bool) -> Iterator[Case]:
    for bucket, max_blocks in [(3, 5)] if tiny else [(1, 2048), (64, 2048), (256, 2048)]:
        for kernel in ("input_prep", "advance_rows"):
            yield Case(
                kernel,
                f"rows {bucket} of 256, max_blocks {max_blocks}",
                lambda device, k=kernel, b=bucket, m=max_blocks: _prepare(device, k, b, m),
                in_graph=True,
            )


def _prepare(device: torch.device, kernel: str, bucket: int, max_blocks: int) -> Prepared:
    ops = dispatch.choose(device)
    short: dict[str, object] = {"device": device, "dtype": torch.int32}
    limit = max_blocks * _BLOCK_SIZE // 2
    rows = DeviceRows(
        torch.randint(0, 1000, (256,), device=device),
        torch.randint(0, limit, (256,), **short),
        torch.randint(1, 9999, (256, max_blocks), **short),
    )
    inputs = StepInputs(
        *(torch.zeros(bucket, device=device, dtype=torch.int64) for _ in range(2)),
        *(torch.zeros(bucket, **short) for _ in range(2)),
        torch.zeros((bucket, max_blocks), **short),
    )
    active = torch.randperm(256, device=device)[:bucket].int()
    tokens = torch.zeros(bucket, device=device, dtype=torch.int64)

    def run() -> None:
        if kernel == "input_prep":
            ops.input_prep(inputs, rows, active, _BLOCK_SIZE)
        else:
            ops.advance_rows(rows, active, tokens)

    def error() -> float:
        before = rows.positions.clone()
        inputs.seq_lens.fill_(-7)
        run()
        if kernel == "advance_rows":
            moved = rows.positions - before
            wrong = int(moved.sum()) != bucket or bool((moved[active.long()] != 1).any())
            rows.positions.copy_(before)
            return float("inf") if wrong else 0.0
        chosen = active.long()
        right = torch.equal(inputs.seq_lens, rows.positions[chosen] + 1)
        right &= torch.equal(inputs.block_table, rows.block_table[chosen])
        return 0.0 if right else float("inf")

    return Prepared(run, error, 0.0, 8 * bucket * max_blocks if kernel == "input_prep" else 0)
