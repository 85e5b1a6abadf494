"""Moves values between host and device without a wait, with one copy in each direction.

It knows integers and tensors. It does not know what they mean. On a GPU both directions use pinned memory, whose
allocator reuses a buffer only after the copy that uses it is done; on a CPU nothing is copied twice.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

ALIGNED = 4
"""Number of integers in 16 bytes: a compiled kernel exists once for tensors that begin at a multiple of 16 bytes, and
would be compiled again, in the middle of serving, for one that does not."""


def upload(device: torch.device, *parts: array[int]) -> tuple[torch.Tensor, ...]:
    """Copies arrays of 32-bit integers to int32 tensors on the device, in one copy."""
    whole, spans = array("i"), []
    for part in parts:
        spans.append((len(whole), len(whole) + len(part)))
        whole += part
        whole.extend([0] * (-len(part) % ALIGNED))
    if not whole:
        return tuple(torch.empty(0, dtype=torch.int32, device=device) for _ in parts)
    tensor = torch.frombuffer(whole, dtype=torch.int32)
    if device.type == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tuple(tensor[start:end] for start, end in spans)


def float_bits(values: Sequence[float]) -> array[int]:
    """Returns the bits of float32 values as integers; `tensor.view(torch.float32)` reads them."""
    return array("i", array("f", values).tobytes())


def word_bits(values: Sequence[int]) -> array[int]:
    """Returns the bits of unsigned 32-bit words as signed integers."""
    return array("i", array("I", values).tobytes())


class Download:
    """Tensors that are being copied to the host, with the values they have when this object is made; `wait` returns
    them."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if tensors and tensors[0].is_cuda:
            self._host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
            for mine, theirs in zip(self._host, tensors, strict=True):
                mine.copy_(theirs, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = [tensor.clone() for tensor in tensors]

    def wait(self) -> list[torch.Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._host
