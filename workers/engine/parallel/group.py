"""The ranks of a worker from the model's side: which one this is, and what they compute together.

It knows tensors and torch.distributed. It uses gloo on a CPU and NCCL on GPUs; there is no other difference. It does
not know layers, steps or processes. Every method is called by all ranks, in the same order.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

from workers.engine.values.errors import ModelError

COLLECTIVE_S = 30.0
"""Timeout of a collective in seconds. A rank that is later is stuck, though alive: the others raise."""
_MEET_POLL_S = 0.05


class Parallel:
    """One of `size` ranks. With a size of 1 every method returns its argument, and torch.distributed is not used."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    @property
    def leads(self) -> bool:
        """True for rank 0, which has the scheduler, draws tokens, and alone sees whole logits."""
        return self.rank == 0

    def spans(self, whole: int) -> list[tuple[int, int]]:
        """Returns start and end of each rank's part of `whole` items; the sizes of parts differ by one at most."""
        ends = [whole * rank // self.size for rank in range(self.size + 1)]
        return list(pairwise(ends))

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the sum over all ranks, computed in place of `x` (contiguous)."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def merge(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the element-wise largest value over all ranks, computed in place of `x` (contiguous)."""
        if self.size > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def gather(self, x: torch.Tensor, whole: int) -> torch.Tensor:
        """Joins `[rows, own part]` of each rank to `[rows, whole]` on rank 0, and returns `[0, whole]` on the
        others."""
        if self.size == 1:
            return x
        padded = self._padded(x, whole)
        parts = [torch.empty_like(padded) for _ in range(self.size)] if self.leads else None
        dist.gather(padded, parts, dst=0)
        return x.new_empty((0, whole)) if parts is None else self._joined(parts, whole)

    def gather_everywhere(self, x: torch.Tensor, whole: int) -> torch.Tensor:
        """Joins `[..., own part]` of each rank to `[..., whole]` on all."""
        if self.size == 1:
            return x
        padded = self._padded(x, whole)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return self._joined(parts, whole)

    def _padded(self, x: torch.Tensor, whole: int) -> torch.Tensor:
        """Pads a part, because collectives need equal shapes and parts may differ by one."""
        return F.pad(x, (0, -(-whole // self.size) - x.shape[-1])).contiguous()

    def _joined(self, parts: list[torch.Tensor], whole: int) -> torch.Tensor:
        spans = zip(parts, self.spans(whole), strict=True)
        return torch.cat([part[..., : end - start] for part, (start, end) in spans], dim=-1)

    def smallest(self, number: int, device: torch.device) -> int:
        if self.size == 1:
            return number
        numbers = torch.tensor([number], dtype=torch.int64, device=device)
        dist.all_reduce(numbers, dist.ReduceOp.MIN)
        return int(numbers.item())

    def meet(self) -> None:
        """Waits for all ranks without a limit, because weights load at different speeds; whoever watches the processes
        sees it if one dies meanwhile."""


ALONE = Parallel()


class Member(Parallel):
    """A rank that has joined the others through a file on this machine: the only open ports are the backend's, on
    loopback."""

    def __init__(self, rank: int, size: int, meeting: Path, device: str) -> None:
        """Joins the group and waits for the others. `device` is this rank's own."""
        super().__init__(rank, size)
        self._store = dist.FileStore(str(meeting), size)  # type: ignore[attr-defined]  # torch.distributed does not export the name
        self._num_meetings = 0
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        self.meet()
        on_gpu = device.startswith("cuda")
        if on_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("group", self._store),  # type: ignore[attr-defined]  # torch.distributed does not export the name
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=COLLECTIVE_S),
            device_id=torch.device(device) if on_gpu else None,
        )

    def meet(self) -> None:
        self._num_meetings += 1
        self._store.add("met", 1)
        while self._store.add("met", 0) < self.size * self._num_meetings:
            time.sleep(_MEET_POLL_S)


def device_of(name: str, rank: int, size: int) -> str:
    """Returns the device of one rank, given the one setting of all ranks: they use the first `size` devices that this
    process sees. Raises ModelError if there are not enough."""
    if size == 1 or name == "cpu":
        return name
    if name not in ("auto", "cuda"):
        raise ModelError(
            f"Tensor parallelism chooses the devices itself: the device must be auto, cuda or cpu, not {name}."
        )
    num_devices = torch.cuda.device_count()
    if name == "auto" and num_devices == 0:
        return "cpu"
    if num_devices < size:
        raise ModelError(f"{size} ranks need {size} CUDA devices, and there are {num_devices}.")
    return f"cuda:{rank}"
