"""The device that computes, and what runs on it: a run that does not fit its memory leaves the memory as it was."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from workers.engine.values.errors import DeviceOutOfMemory, ModelError

T = TypeVar("T")


def device_of(name: str) -> torch.device:
    """Returns the device of this name, ready to compute; auto means cuda if there is one. Raises ModelError if it is not
    there."""
    torch.set_float32_matmul_precision("highest")  # NVIDIA's images set a variable that makes products TF32
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"The device {name} is not there.")
    return torch.device(name)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which the device is current. The current device belongs to a thread, and steps are launched
    from another thread than the one that loaded the model."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def guarded(device: torch.device, run: Callable[[], T]) -> T:
    """Runs a function. Raises DeviceOutOfMemory if the device has too little memory for it."""
    with torch.inference_mode(), current(device):
        try:
            return run()
        except torch.OutOfMemoryError as error:
            reason = str(error).partition("\n")[0]
    # The error is gone by now, and so are the frames that held the tensors of the step.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    raise DeviceOutOfMemory(reason)
