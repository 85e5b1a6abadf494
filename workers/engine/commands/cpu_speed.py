"""Measures this CPU in under two seconds: free memory, read bandwidth, matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from workers.engine.kv.kv_store import available_bytes
from workers.engine.sizing.devices import Device

_READ_BYTES = 256 << 20
_PRODUCT = 1024
_LIMIT_S = 0.4
"""Seconds for each of the three figures."""


def measure(num_ranks: int = 1) -> Device:
    """Measures with torch's threads. Ranks share the machine: the rates are those of one rank, the memory is that of
    all."""
    memory = available_bytes()
    read = _read_bytes_per_s(min(_READ_BYTES, memory // 8)) / num_ranks
    wide, narrow = (_product_flops(dtype) / num_ranks for dtype in (torch.float32, torch.bfloat16))
    source = f"measured now, {torch.get_num_threads()} threads"
    return Device("cpu", memory, read, narrow, wide, 0.0, source, is_cpu=True)


def _read_bytes_per_s(num_bytes: int) -> float:
    words = torch.ones(num_bytes // 4)
    return words.nbytes / _least_s(lambda: words.sum())


def _product_flops(dtype: torch.dtype) -> float:
    left, right = torch.randn((2, _PRODUCT, _PRODUCT)).to(dtype)
    return 2 * _PRODUCT**3 / _least_s(lambda: left @ right)


def _least_s(call: Callable[[], object]) -> float:
    """Returns the shortest time of a few calls: other processes use this machine too, so the shortest time is nearest
    to what it can do."""
    times: list[float] = []
    end = time.perf_counter() + _LIMIT_S
    while len(times) < 2 or (time.perf_counter() < end and len(times) < 50):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)
