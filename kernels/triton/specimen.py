"""A kernel configuration as the ahead-of-time gate compiles it: the launch that production would make, with its
budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Budget:
    """The resources that a compiled configuration may use, and the instructions it must contain. Stack and local memory
    are always 0."""

    registers: int
    """Most registers per thread."""
    shared: int | None = None
    """Most bytes of shared memory; None means the capability's limit."""
    min_shared: int = 0
    """Least bytes of shared memory, to prove that tiles are buffered ahead."""
    async_copies: bool = False
    """The code must contain 16-byte asynchronous copies (`cp.async.cg`)."""
    matrix_unit: Literal["", "mma", "wgmma"] = ""


@dataclass(frozen=True)
class Specimen:
    name: str
    """Kernel and configuration, unique: `rms_norm bf16 4096`."""
    kernel: Any
    """The function under `@triton.jit`."""
    args: tuple[Any, ...]
    """Positional arguments: a torch dtype for a pointer, numbers as production passes them (Triton specialises on 1 and
    on multiples of 16)."""
    constants: dict[str, Any]
    budget: Budget
    num_warps: int = 4
    num_stages: int = 1
    options: dict[str, Any] = field(default_factory=dict)
