"""How long a call takes on its device, and the two ceilings that every other figure is divided by.

A GPU is timed by events (Triton's `do_bench`) or, for calls of a few microseconds, by replaying a captured graph of
many of them; a CPU, where only the scripts themselves are tested, by the clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from workers.engine.sizing.capacity import Ceilings

CALLS_PER_GRAPH = 20
COPY_BYTES = 1 << 30
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Timed:
    seconds: float
    """The median."""
    spread: float
    """The noise floor: the difference of two measurements of the same thing over the smaller one."""


def timed(call: Callable[[], object], device: torch.device, in_graph: bool = False) -> Timed:
    if device.type != "cuda":
        first, second = _by_clock(call), _by_clock(call)
    elif in_graph:
        replay = captured(call)
        first, second = (_by_events(replay) / CALLS_PER_GRAPH for _ in range(2))
    else:
        first, second = _by_events(call), _by_events(call)
    low, high = sorted((first, second))
    return Timed(low, (high - low) / low)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """A replay of `CALLS_PER_GRAPH` calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and makes lazy handles, outside of the capture
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_PER_GRAPH):
            call()
    return graph.replay


def ceilings(device: torch.device, tiny: bool) -> Ceilings:
    """Measures both ceilings on random data, because a product of zeros runs faster than any real one."""
    size = 256 if tiny else MATMUL_SIZE
    left, right = torch.randn((2, size, size), device=device, dtype=torch.bfloat16)
    out = torch.empty_like(left)
    product = timed(lambda: torch.matmul(left, right, out=out), device)
    num_bytes = 1 << 20 if tiny else COPY_BYTES
    source = torch.randint(0, 255, (num_bytes,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    copy = timed(lambda: target.copy_(source), device)
    return Ceilings(2 * num_bytes / copy.seconds, 2 * size**3 / product.seconds)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _by_events(call: Callable[[], object]) -> float:
    import triton.testing

    return float(triton.testing.do_bench(call, return_mode="median")) / 1000


def _by_clock(call: Callable[[], object]) -> float:
    call()
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
