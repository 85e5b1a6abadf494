"""A call captured in a CUDA graph and replayed."""

from __future__ import annotations

from collections.abc import Callable

import torch


def replayed(call: Callable[[], None], out: torch.Tensor) -> torch.Tensor:
    """Returns what `call` leaves in `out` when it is replayed: warmed up, captured, the output poisoned, replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    return out
