"""RMSNorm: the twin against float64, the Triton kernel in the interpreter against the twin."""

from __future__ import annotations

import pytest
import torch
from guarded import Guarded, relative_error

from kernels import dispatch

TWIN = dispatch.choose(torch.device("cpu"))
TRITON = dispatch.choose(torch.device("cpu"), {"rms_norm"})
DTYPES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def inputs(num_tokens: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_tokens * 1000 + hidden)
    x, residual = torch.randn((2, num_tokens, hidden), generator=generator).to(dtype)
    return x, residual, (1 + torch.randn(hidden, generator=generator) / 4).to(dtype)


@pytest.mark.parametrize("ops", [TWIN, TRITON], ids=["twin", "triton"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [16, 63, 64, 65, 300])
@pytest.mark.parametrize("with_residual", [False, True])
def test_the_norm_is_that_of_float64(ops, dtype, hidden, with_residual):
    x, residual, weight = inputs(3, hidden, dtype)
    total = (x + residual if with_residual else x).double()
    expected = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
    out = Guarded((3, hidden), dtype)
    ops.rms_norm(out.tensor, x, weight, 1e-6, residual if with_residual else None)
    out.check()
    assert relative_error(out.tensor, expected) <= DTYPES[dtype]
    if with_residual:
        assert relative_error(residual, total) <= DTYPES[dtype]
