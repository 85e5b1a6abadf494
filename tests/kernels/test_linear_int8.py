"""Row T1: products of 8-bit integers are exact on a CPU whatever instructions it has."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

KINDS = ("ALL", "AVX512_CORE", "AVX2")
CODE = """
import json, os, sys, traceback
import torch
from kernels.reference.linear import linear_w8a8

def check():
    generator = torch.Generator().manual_seed(0)
    for depth in (24, 256, 1024, 2056):
        for draw in (lambda n: torch.randint(-127, 128, (n, depth), dtype=torch.int8, generator=generator),
                     lambda n: torch.full((n, depth), -127, dtype=torch.int8)):
            x, weight = draw(9), draw(64)
            out = torch.empty((9, 64))
            linear_w8a8(out, x, torch.ones(9), weight, torch.ones(64))
            expected = x.long() @ weight.long().T
            assert torch.equal(out, expected.float()), (depth, (out - expected).abs().max())

codes = {}
for kind in sys.argv[1:]:
    child = os.fork()
    if not child:
        code = 1
        try:
            os.environ["ONEDNN_MAX_CPU_ISA"] = kind
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(code)
    codes[kind] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""


@functools.cache
def checked() -> tuple[dict[str, int], str]:
    """The exit status for each kind of CPU, and what was said. oneDNN reads its variable at its first product: torch is
    imported once, and each kind is a fork of a process that has multiplied nothing yet."""
    done = subprocess.run([sys.executable, "-c", CODE, *KINDS], capture_output=True, text=True, check=True)
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("isa", KINDS)
def test_integer_products_do_not_saturate(isa: str) -> None:
    """Without VNNI oneDNN adds up pairs of products in 16 bits."""
    codes, said = checked()
    assert codes[isa] == 0, said
