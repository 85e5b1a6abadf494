"""What a compiled kernel has to know of where it runs. Imported by Triton modules only."""

from __future__ import annotations

import os

import torch
import triton

# The default changes after Triton 3.9: tests, the ahead-of-time gate and production are to round alike.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

INTERPRETED_CAPABILITY = 90


def interpreting() -> bool:
    """Whether Triton runs kernels as Python. It decides so when a kernel's module is imported. 16-bit brain floats
    are garbage there unless a kernel casts them right behind the load (its flag UPCAST)."""
    return bool(triton.knobs.runtime.interpret)


def capability(device: torch.device) -> int:
    """Compute capability as one number: 80, 90."""
    if device.type != "cuda":
        return INTERPRETED_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
