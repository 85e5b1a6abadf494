"""A call inside a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """The graph of one call, captured after a first call outside that compiles its kernels."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
