"""Outputs for kernels under test: poisoned, inside a larger buffer whose edges tell whether anything else was written."""

from __future__ import annotations

import torch

_GUARD = 64


class Guarded:
    """`tensor` is a contiguous part of a poisoned buffer (NaN for floats, a pattern for integers)."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        size = 1
        for length in shape:
            size *= length
        self._poison = float("nan") if dtype.is_floating_point else 77
        self._buffer = torch.full((size + 2 * _GUARD,), self._poison, dtype=dtype)
        self.tensor = self._buffer[_GUARD : _GUARD + size].view(shape)

    def check(self) -> None:
        """Raises AssertionError if the edges were touched."""
        for edge in (self._buffer[:_GUARD], self._buffer[len(self._buffer) - _GUARD :]):
            clean = edge.isnan() if edge.is_floating_point() else edge == self._poison
            assert bool(clean.all()), "written outside of the output"


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference relative to the largest expected value; infinite if anything is NaN."""
    if found.isnan().any():
        return float("inf")
    difference = (found.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp(min=1e-30))
