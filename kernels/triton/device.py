"""The properties of the device that compiled kernels depend on. Only Triton modules import this module."""

from __future__ import annotations

import os

import torch
import triton

# The default changes after Triton 3.9: tests, the ahead-of-time gate and production have to round alike.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

INTERPRETED_CAPABILITY = 90


def interpreting() -> bool:
    """Returns whether Triton runs kernels as Python. Triton decides so when a kernel's module is imported. bfloat16
    values are garbage there unless a kernel casts them right after the load (its flag UPCAST)."""
    return bool(triton.knobs.runtime.interpret)


def capability(device: torch.device) -> int:
    """Returns the compute capability as one number, such as 80 or 90."""
    if device.type != "cuda":
        return INTERPRETED_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor
