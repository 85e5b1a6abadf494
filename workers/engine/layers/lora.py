"""A linear layer with LoRA adapters (arXiv 2106.09685): each token may have its own low-rank addition.

It owns the adapters' weights for this layer, in slots of a fixed number and rank. It does not know names, files or
tenants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kernels.dispatch import Ops
from kernels.reference.group_rows import RowGroups
from kernels.reference.lora import TILE


@dataclass(slots=True)
class TokenAdapters:
    """The adapter of each token of the running pass. It is set by the runner before a pass and read by its layers."""

    groups: RowGroups | None = None
    """Tokens grouped by adapter; the value is None if no token uses one."""

    def set(self, slots: list[int] | None, num_slots: int, ops: Ops) -> None:
        """Sets the adapter of every token of the pass by its slot; -1 means no adapter. `slots` is None if no token
        uses one."""
        self.groups = None
        if slots is None:
            return
        ids = torch.tensor(slots, dtype=torch.int32, device=ops.device)
        groups = RowGroups.of(ids, num_slots, TILE)
        ops.weights.group_rows(groups)
        self.groups = groups


class LoraLinear(nn.Module):
    """A layer with adapters. `ends` has the last output, exclusive, of each projection that the layer computes at
    once."""

    def __init__(
        self,
        layer: nn.Module,
        ends: tuple[int, ...],
        in_features: int,
        dtype: torch.dtype,
        room: tuple[int, int],
        tokens: TokenAdapters,
        ops: Ops,
    ) -> None:
        """`room` has the number of slots, and their rank."""
        super().__init__()
        number, rank = room
        self.layer, self.ends = layer, ends
        self._shrink = torch.zeros((number, len(ends), rank, in_features), dtype=dtype, device=ops.device)
        self._expand = torch.zeros((number, ends[-1], rank), dtype=dtype, device=ops.device)
        self._tokens, self._ops = tokens, ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        if self._tokens.groups is None:
            return out
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        added = out.reshape(len(rows), -1).contiguous()
        self._ops.weights.lora(added, rows, self._shrink, self._expand, self._tokens.groups, self.ends)
        return added.view(out.shape)

    def put(self, slot: int, part: int, down: torch.Tensor, up: torch.Tensor, scale: float) -> None:
        """Writes one projection of an adapter: `down` `[rank, in_features]` and `up` `[part's outputs, rank]`, of at
        most this layer's rank. Raises ValueError if they have another size."""
        first = self.ends[part - 1] if part else 0
        rank, room = len(down), self._shrink.shape[2]
        needed = ([rank, self._shrink.shape[3]], [self.ends[part] - first, rank])
        if (list(down.shape), list(up.shape)) != needed:
            raise ValueError(f"shapes {list(down.shape)} and {list(up.shape)}, not {needed}")
        if rank > room:
            raise ValueError(f"rank {rank} is above {room}")
        self._shrink[slot, part, :rank] = down.to(self._shrink)
        self._expand[slot, first : self.ends[part], :rank] = (up.float() * scale).to(self._expand)

    def clear(self, slot: int) -> None:
        self._shrink[slot] = 0
        self._expand[slot] = 0
