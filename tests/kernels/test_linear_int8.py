"""Row T1: products of 8-bit integers are exact on a CPU whatever instructions it has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import torch
from kernels.reference.linear import linear_w8a8
generator = torch.Generator().manual_seed(0)
for depth in (24, 256, 1024, 2056):
    for draw in (lambda n: torch.randint(-127, 128, (n, depth), dtype=torch.int8, generator=generator),
                 lambda n: torch.full((n, depth), -127, dtype=torch.int8)):
        x, weight = draw(9), draw(64)
        out = torch.empty((9, 64))
        linear_w8a8(out, x, torch.ones(9), weight, torch.ones(64))
        expected = x.long() @ weight.long().T
        assert torch.equal(out, expected.float()), (depth, (out - expected).abs().max())
"""


@pytest.mark.parametrize("isa", ["ALL", "AVX512_CORE", "AVX2"])
def test_integer_products_do_not_saturate(isa: str) -> None:
    """Without VNNI oneDNN adds up pairs of products in 16 bits."""
    environment = dict(os.environ, ONEDNN_MAX_CPU_ISA=isa)
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
