"""Muon: momentum whose step is made orthogonal, for the matrices inside the layers.

On a corpus of a few million tokens it reaches a given loss in clearly fewer steps than AdamW. It is not for embeddings
and norms; AdamW trains those.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # a quintic whose iteration drives singular values to ~1


def orthogonalize(batch: Tensor, steps: int = 5) -> Tensor:
    """Replaces every matrix of the batch (wide or square) by one with singular values near 1."""
    a, b, c = COEFFICIENTS
    x: Tensor = batch.bfloat16()
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.float()


class Muon:
    """The optimizer. Matrices of the same shape are updated together, which is what makes this fast on a CPU."""

    def __init__(self, parameters: list[Tensor], *, momentum: float = 0.95, weight_decay: float = 0.0) -> None:
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for parameter in parameters:
            rows, columns = parameter.shape
            self._groups[(min(rows, columns), max(rows, columns))].append(parameter)
        self._buffers = {shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for shape, group in self._groups.items():
            gradient = torch.stack([_wide(_gradient(p)) for p in group])
            buffer = self._buffers[shape]
            buffer.lerp_(gradient, 1 - self._momentum)
            update = orthogonalize(gradient.lerp(buffer, self._momentum))
            for parameter, delta in zip(group, update, strict=True):
                rows, columns = parameter.shape
                scale = max(1.0, rows / columns) ** 0.5
                parameter.mul_(1 - rate * self._weight_decay)
                parameter.sub_(delta if rows <= columns else delta.mT, alpha=rate * scale)


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None, "a step without a backward pass"
    return parameter.grad


def _wide(matrix: Tensor) -> Tensor:
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.mT
