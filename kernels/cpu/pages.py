"""Memory in pages of 2 MiB, for what is read from end to end in every step.

Knows bytes. Does not know weights. A core that reads on and on looks up a page every 4 KiB otherwise, and its reading
ahead stops at each.
"""

from __future__ import annotations

import mmap

import torch

SIZE = 1 << 21


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, in large pages as far as the system has any; the tensor itself if it is too small for one."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if tensor.nbytes < SIZE or advice is None:
        return tensor
    memory = mmap.mmap(-1, tensor.nbytes + SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(advice)
    except OSError:  # a kernel without them
        return tensor
    content = torch.frombuffer(memory, dtype=torch.uint8)  # holds the memory
    first = -content.data_ptr() % SIZE
    copy = content[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)
