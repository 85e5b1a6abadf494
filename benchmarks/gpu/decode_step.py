"""The decode step of a whole model at batch sizes 1 to 256, against reading its weights and its KV once.

Steps go through `launch` and `collect` as the engine drives them: with a runner that can lag, the next step is
launched before the one before it is collected, so host work that is not hidden shows.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import torch

from benchmarks.gpu.models import Shape
from benchmarks.gpu.timing import Ceilings, synchronize
from workers.engine.device.runner import ModelRunner
from workers.engine.values.plan import PENDING, Row, SampleSpec, Ticket
from workers.protocol.messages import SamplingParams

_GREEDY = SamplingParams(seed=0, temperature=0.0, ignore_eos=True)


class Decode:
    """`batch` sequences of `context` tokens each, in blocks of their own, one token further with each step."""

    def __init__(self, runner: ModelRunner, batch: int, context: int, num_steps: int) -> None:
        self._runner = runner
        size = runner.block_size
        per_row = -(-(context + num_steps + 1) // size)
        self._blocks = [list(range(1 + row * per_row, 1 + (row + 1) * per_row)) for row in range(batch)]
        assert self._blocks[-1][-1] < runner.num_blocks, "not enough blocks for this batch"
        self._context, self._step = context, 0
        self._tokens = [1] * batch

    def rows(self) -> list[Row]:
        position = self._context + self._step
        self._step += 1
        used = position // self._runner.block_size + 1
        return [
            Row([token], position, blocks[:used], (SampleSpec(_GREEDY, 0, position + 1, (), ()),), row_id=row_id)
            for row_id, (token, blocks) in enumerate(zip(self._tokens, self._blocks, strict=True))
        ]

    def run(self, num_steps: int) -> list[float]:
        """Seconds between the ends of neighbouring steps."""
        ends = []
        flying: Ticket | None = None
        for _ in range(num_steps):
            launched = self._runner.launch(self.rows())
            if self._runner.lag:
                self._tokens = [PENDING] * len(self._tokens)
                flying, launched = launched, flying  # collect the one before
            if launched is not None:
                results = launched.collect()
                if not self._runner.lag:
                    self._tokens = [result.drawn[0].token for result in results]
                ends.append(time.perf_counter())
        if flying is not None:
            flying.collect()
            ends.append(time.perf_counter())
        return [b - a for a, b in itertools.pairwise(ends)]


def measure(
    shape: Shape, runner: ModelRunner, batch: int, context: int, num_steps: int, ceilings: Ceilings
) -> dict[str, Any]:
    device = runner.store.tensor.device
    warm_up = max(3, num_steps // 8)
    decode = Decode(runner, batch, context, num_steps + warm_up)
    decode.run(warm_up)
    synchronize(device)
    seconds = statistics.median(decode.run(num_steps))
    floor = shape.served.decode_s([context] * batch, ceilings)
    return {
        "model": shape.name,
        "batch": batch,
        "context": context,
        "ms": seconds * 1000,
        "floor_ms": floor * 1000,
        "share_of_floor": floor / seconds,
        "tokens_per_s": batch / seconds,
    }


def idle_share(runner: ModelRunner, batch: int, context: int, num_steps: int) -> dict[str, Any]:
    """Returns the time in which the device computed nothing, over the time of the steps, from the profiler's kernel
    intervals."""
    decode = Decode(runner, batch, context, 2 * num_steps)
    decode.run(num_steps)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        decode.run(num_steps)
        torch.cuda.synchronize()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    if not spans:
        return {"batch": batch, "failed": "the profiler saw no kernels"}
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return {"batch": batch, "context": context, "idle_share": 1 - busy / (end - spans[0][0])}
