"""A histogram of ages, weighted by blocks. The module knows numbers only."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0, 1800.0, 3600.0)


class Ages:
    """Numbers of blocks by their age. The last number is of ages above every bound."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)
        self.sum_s = 0.0

    def add(self, age_ms: int, num_blocks: int) -> None:
        age_s = age_ms / 1000
        self.counts[bisect_left(BOUNDS_S, age_s)] += num_blocks
        self.sum_s += age_s * num_blocks
