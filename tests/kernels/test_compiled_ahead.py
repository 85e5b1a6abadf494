"""What only the compiler shows of a kernel: compiled for a GPU in a process without the interpreter, one for all of it."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

CODE = """
import json
from kernels import ahead
from kernels.triton.products import linear_quant
from kernels.triton.sampling import logits

ahead._pretend(90)
found = [s for s in linear_quant.specimens(90) if s.name.startswith("tokens")]
warm = [one.kernel.warmup(*one.args, grid=(1,), **one.options, **one.constants) for one in found[:2]]
said = dict(zip(("int8", "fp8"), (kernel.asm["ptx"] for kernel in warm)))
(one,) = [s for s in logits.specimens(90) if s.name == "scan 50257 edits 16"]
counts = (1, 5, 16, 40, 300)
scans = [one.kernel.warmup(*one.args[:-1], n, grid=(1,), num_warps=4, **one.constants) for n in counts]
said["scans"] = len({id(scan) for scan in scans})
print(json.dumps(said))
"""


@functools.cache
def compiled() -> dict[str, Any]:
    """Returns the PTX of the kernels that round tokens, by the dtype, and how many scans serve the numbers of biases."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True)
    said: dict[str, Any] = json.loads(done.stdout)
    return said


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_tokens_are_rounded_by_exact_divisions(dtype: str) -> None:
    """A GPU's `/` is rounded otherwise: there Triton's is approximate, and torch's by a plain number a product."""
    assert "div.full" not in compiled()[dtype]


def test_one_compiled_scan_serves_every_number_of_biases() -> None:
    """A variant for each number would be compiled in front of everybody's streams."""
    assert compiled()["scans"] == 1
