"""Measures how much attention the blocks of a row receive from its last tokens, in addition to a pass. It is plain torch, on
any device, because kernels do not return these sums. It reads the keys again, so it is meant for few tokens.

It knows packed queries and paged keys. It does not know who asked for the sums. Every layer and head counts the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.reference.quant import bits, widen
from workers.engine.values.plan import Row
from workers.engine.values.probe import DECAY, AttentionMass


@dataclass(frozen=True, slots=True)
class Observed:
    first: int
    """Index of the first observed query in the pass."""
    number: int
    num_keys: int
    """Number of keys that the last query sees."""
    blocks: torch.Tensor


class MassProbe:
    def __init__(self, rows: Sequence[Row], starts: Sequence[int], block_size: int, device: torch.device) -> None:
        """`starts` has the index in the pass of each row's first token."""
        self._observed: dict[int, Observed] = {}
        self._sums: dict[int, torch.Tensor] = {}
        self._num_layers = 0
        for index, row in enumerate(rows):
            if not isinstance(row.probe, AttentionMass):
                continue
            number = row.probe.num_tokens
            num_keys = row.kv_start + len(row.tokens)
            table = row.block_table[: -(-num_keys // block_size)]
            blocks = torch.tensor(table, dtype=torch.int64, device=device)
            first = starts[index] + len(row.tokens) - number
            self._observed[index] = Observed(first, number, num_keys, blocks)
            self._sums[index] = torch.zeros(len(table), device=device)

    def add(
        self, query: torch.Tensor, kv: torch.Tensor, scales: torch.Tensor | None, scale: float, softcap: float
    ) -> None:
        """Adds one layer: `query` is `[num_tokens, H, D]`, with its KV and the scales of 8-bit KV
        (kv_store.LayerKV)."""
        self._num_layers += 1
        for index, row in self._observed.items():
            keys = widen(bits(kv)[row.blocks, 0].view(kv.dtype))
            if scales is not None:
                keys = keys * scales[row.blocks, 0][..., None]
            found = _mass(query[row.first : row.first + row.number], keys, row, scale, softcap)
            self._sums[index] += found

    def of(self, index: int) -> tuple[float, ...]:
        """Returns the answer for the row with this index, which asked for it."""
        return tuple((self._sums[index] / self._num_layers).tolist())


def _mass(query: torch.Tensor, keys: torch.Tensor, row: Observed, scale: float, softcap: float) -> torch.Tensor:
    """Returns the attention that each block receives. `keys` is `[num_blocks, KVH, block_size, D]`."""
    num_blocks, num_kv_heads, block_size, head_dim = keys.shape
    number, num_heads = query.shape[:2]
    groups = query.float().view(number, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("qkgd,nksd->qkgns", groups, keys).flatten(-2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    place = torch.arange(num_blocks * block_size, device=query.device)
    last = torch.arange(row.num_keys - number, row.num_keys, device=query.device)
    unseen = place[None, :] > last[:, None]
    # Slots that were never written may hold anything.
    scores = scores.masked_fill(unseen[:, None, None, :], float("-inf"))
    received = scores.softmax(-1).sum((1, 2)) / num_heads
    behind = torch.arange(number - 1, -1, -1, device=query.device)
    return (DECAY**behind @ received).view(num_blocks, block_size).sum(-1)
