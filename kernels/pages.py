"""Allocates memory in pages of 2 MiB, for data that is read from end to end in every step.

It knows bytes. It does not know weights. With small pages a core that reads sequentially looks up a page every 4 KiB,
and its prefetching stops at each page.
"""

from __future__ import annotations

import mmap

import torch

SIZE = 1 << 21


def in_large_pages(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy, in large pages as far as the system has any; the tensor itself if it is too small for one."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if tensor.nbytes < SIZE or advice is None:
        return tensor
    memory = mmap.mmap(-1, tensor.nbytes + SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(advice)
    except OSError:  # the operating system does not support them
        return tensor
    content = torch.frombuffer(memory, dtype=torch.uint8)  # this tensor owns the memory
    first = -content.data_ptr() % SIZE
    copy = content[first : first + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)
