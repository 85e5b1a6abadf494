"""Compiled kernels compute what their twins do."""

from __future__ import annotations

import pytest
import torch

from kernels import dispatch

CUDA = torch.device("cuda")


@pytest.mark.parametrize("hidden", [64, 300, 1024, 4096, 5120])
def test_the_norm_equals_its_twin(hidden):
    ops, twin = dispatch.choose(CUDA), dispatch.choose(CUDA, ())
    x, residual = torch.randn((2, 7, hidden), device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(hidden, device=CUDA, dtype=torch.bfloat16)
    found, expected = torch.full_like(x, float("nan")), torch.empty_like(x)
    ops.rms_norm(found, x, weight, 1e-6, residual.clone())
    twin.rms_norm(expected, x, weight, 1e-6, residual.clone())
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)
