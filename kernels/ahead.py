"""Compiles every kernel configuration for GPUs that this machine need not have, and compares each with its budget.

`python -m kernels.ahead` prints a table and exits with 1 if one does not compile or exceeds its budget. Triton brings
its own assembler; a driver that only names the target lets its real argument specialiser run without a device.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.triton.specimen import Specimen

MODULES = {
    "attention_decode": "kernels.triton.attention.attention_decode",
    "attention_prefill": "kernels.triton.attention.attention_prefill",
    "attention_shared": "kernels.triton.attention.attention_shared",
    "block_copy": "kernels.triton.block_copy",
    "group_rows": "kernels.triton.products.group_rows",
    "kv_write": "kernels.triton.kv_write",
    "linear": "kernels.triton.products.linear",
    "linear_quant": "kernels.triton.products.linear_quant",
    "logits": "kernels.triton.sampling.logits",
    "lora": "kernels.triton.products.lora",
    "moe": "kernels.triton.products.moe",
    "norm": "kernels.triton.norm",
    "pointwise": "kernels.triton.pointwise",
    "rows": "kernels.triton.rows",
    "sample": "kernels.triton.sampling.sample",
}
"""Triton modules by short name; each has `specimens(capability)`."""
CAPABILITIES = (80, 90)
SHARED_LIMIT = {80: 166_912, 90: 232_448}
"""Bytes of shared memory that one program may have, by capability."""
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)")


@dataclass(frozen=True)
class Compiled:
    capability: int
    name: str
    seconds: float
    registers: int = 0
    shared: int = 0
    marks: tuple[str, ...] = ()
    """The instructions among cp.async, mma and wgmma that the code contains."""
    faults: tuple[str, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.ahead", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--module", action="append", choices=MODULES, help="only these modules")
    parser.add_argument("--capability", type=int, action="append", choices=CAPABILITIES)
    told = parser.parse_args()
    tasks = [
        (capability, module) for capability in told.capability or CAPABILITIES for module in told.module or MODULES
    ]
    started = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(told.jobs) as pool:
        jobs = [(c, m, i) for c, m in tasks for i in range(_count(c, m))]
        rows = list(pool.imap(_compile, jobs, chunksize=1))
    faults = sum(1 for row in rows if row.faults)
    print(_table(rows))
    print(
        f"Triton {_triton_version()}: {len(rows)} configurations, {faults} with faults, "
        f"{time.monotonic() - started:.0f} s."
    )
    return 1 if faults or not rows else 0


def specimens(capability: int, module: str) -> Iterator[Specimen]:
    found: Iterator[Specimen] = importlib.import_module(MODULES[module]).specimens(capability)
    return found


def _count(capability: int, module: str) -> int:
    return sum(1 for _ in specimens(capability, module))


def _compile(job: tuple[int, str, int]) -> Compiled:
    capability, module, index = job
    specimen = list(specimens(capability, module))[index]
    started = time.monotonic()
    _pretend(capability)
    try:
        kernel = specimen.kernel.warmup(
            *specimen.args,
            grid=(1,),
            num_warps=specimen.num_warps,
            num_stages=specimen.num_stages,
            **specimen.options,
            **specimen.constants,
        )
    except Exception as error:  # noqa: BLE001  # whatever a compiler raises is a line of the table
        fault = f"does not compile: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
        return Compiled(capability, specimen.name, time.monotonic() - started, faults=(fault,))
    return _judge(capability, specimen, kernel, time.monotonic() - started)


def _judge(capability: int, specimen: Specimen, kernel: Any, seconds: float) -> Compiled:
    registers, stack, _, local = _usage(kernel.asm["cubin"])
    shared, ptx, budget = kernel.metadata.shared, kernel.asm["ptx"], specimen.budget
    marks = tuple(
        mark for mark, text in (("cp.async", "cp.async.cg"), ("mma", "mma.sync"), ("wgmma", "wgmma.mma")) if text in ptx
    )
    limit = SHARED_LIMIT[capability] if budget.shared is None else budget.shared
    broken = {
        f"{registers} registers > {budget.registers}": registers > budget.registers,
        f"stack {stack}, local {local} bytes": bool(stack or local or "ld.local" in ptx),
        f"shared {shared} > {limit} bytes": shared > limit,
        f"shared {shared} < {budget.min_shared} bytes": shared < budget.min_shared,
        "no 16-byte asynchronous copy": budget.async_copies and "cp.async" not in marks,
        f"no {budget.matrix_unit}": bool(budget.matrix_unit) and budget.matrix_unit not in marks,
    }
    faults = tuple(text for text, is_broken in broken.items() if is_broken)
    return Compiled(capability, specimen.name, seconds, registers, shared, marks, faults)


def _usage(cubin: bytes) -> tuple[int, ...]:
    """Returns registers, stack, static shared and local bytes, as the bundled `cuobjdump` reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = _USAGE.search(done.stdout)
    assert found is not None, done.stdout
    return tuple(map(int, found.groups()))


def _pretend(capability: int) -> None:
    """Makes the capability Triton's current target. Triton's caches are keyed by device number, so the device number
    differs too."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Absent(DriverBase):  # type: ignore[misc]  # triton has no types
        get_current_target = staticmethod(lambda: GPUTarget("cuda", capability, 32))
        get_current_device = staticmethod(lambda: capability)
        set_current_device = staticmethod(lambda device: None)
        get_current_stream = staticmethod(lambda device=None: 0)
        get_active_torch_device = staticmethod(lambda: torch.device("cpu"))
        get_device_capability = staticmethod(lambda device=None: divmod(capability, 10))
        is_active = staticmethod(lambda: True)
        map_python_to_cpp_type = staticmethod(lambda kind: "void")
        get_benchmarker = staticmethod(lambda: None)

    triton.runtime.driver.set_active(Absent())


def _table(rows: list[Compiled]) -> str:
    lines = [f"{'target':7} {'configuration':44} {'regs':>5} {'shared':>7} {'s':>5}  contains"]
    for row in rows:
        lines.append(
            f"sm_{row.capability:<4} {row.name:44} {row.registers:>5} {row.shared:>7} "
            f"{row.seconds:>5.1f}  {' '.join(row.marks)}"
        )
        lines += [f"        FAULT {fault}" for fault in row.faults]
    return "\n".join(lines)


def _triton_version() -> str:
    import triton

    return str(triton.__version__)


if __name__ == "__main__":
    sys.exit(main())
