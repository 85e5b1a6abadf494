"""One kernel at one shape: how to run it, how to check it, what it must move and compute at least.

Each module beside this one has `cases(tiny)`: the shapes of a GPU, or a few small ones for which everything also runs
on a CPU, so that the script is tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Prepared:
    """Inputs are on the device, random, rotated by `run` over sets that together pass the last cache four times."""

    run: Callable[[], None]
    """One call of the op through `kernels.dispatch`; the next call takes the next set of inputs."""
    error: Callable[[], float]
    """Poisons the outputs, calls once, and gives the largest relative error against float64 on sampled rows;
    infinite if an element was not written."""
    tolerance: float
    num_bytes: int
    """Compulsory: each input read once, each output written once. 0: not bound by memory."""
    flops: int = 0
    """0: not bound by arithmetic."""
    peers: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Other implementations on the same inputs. One that cannot run raises when it is called first."""


@dataclass(frozen=True)
class Case:
    kernel: str
    """Name of the op."""
    shape: str
    """`rows 32, context 4096, heads 32/8 x 128, bf16`."""
    prepare: Callable[[torch.device], Prepared]
    in_graph: bool = False
    """Timed by replaying a captured graph of many calls: for kernels of a few microseconds."""
    bar: str = ""
    """The figure of kernels.md section 9 that this shape answers to."""


def num_sets(num_bytes: int, tiny: bool) -> int:
    """Returns how many sets of inputs of so many bytes pass the last cache four times over."""
    return 2 if tiny else min(64, max(2, (256 << 20) // num_bytes))


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest error relative to the largest expected value; infinite if an element is NaN."""
    difference = (found.double() - expected).abs().nan_to_num(torch.inf)
    return float(difference.max() / expected.abs().max())
