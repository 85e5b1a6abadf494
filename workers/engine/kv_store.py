"""The KV tensor of a worker: how large it may be, one view per layer, copies of whole blocks. 8-bit KV has a second
tensor, of scales.

Knows bytes and block ids. Does not know which sequence owns a block, nor what is in one. Block 0 is the null block:
nobody's tokens are ever there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.dispatch import Ops
from kernels.reference.quant import is_quantized
from workers.engine.errors import ModelError

_CPU_SHARE, _CPU_LIMIT = 0.10, 2 << 30
"""A CPU worker shares its memory with everything else on the machine."""
_CUDA_SHARE = 0.90
_WORKSPACE = 1 << 30
"""Left on a device for activations and logits of a step."""
_MAX_FULL_SEQUENCES = 256
"""More sequences of full length than this are never resident: a tiny model must not take gigabytes."""


@dataclass(frozen=True, slots=True)
class KVShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    """What keys and values are stored in: the model's own, or an 8-bit format."""

    @property
    def is_quantized(self) -> bool:
        return is_quantized(self.dtype)

    @property
    def bytes_per_block(self) -> int:
        heads = self.num_layers * 2 * self.num_kv_heads * self.block_size
        per_head = self.head_dim * self.dtype.itemsize
        if self.is_quantized:
            per_head += torch.float32.itemsize  # its scale
        return heads * per_head


def plan_num_blocks(
    shape: KVShape,
    device: torch.device,
    max_model_len: int,
    memory: int | None = None,
    num_ranks: int = 1,
) -> int:
    """Blocks that fit into `memory` bytes (default: a share of what is free), the null block included. `num_ranks`
    processes each have as much: a device of their own, or a share of this machine."""
    given = _free_memory(device, num_ranks) if memory is None else memory
    num_blocks = given // shape.bytes_per_block
    if memory is None:
        num_blocks = min(
            num_blocks, 1 + _MAX_FULL_SEQUENCES * -(-max_model_len // shape.block_size)
        )
    if num_blocks < 2:
        raise ModelError(
            f"{given} bytes are not enough for KV: one block needs {shape.bytes_per_block} bytes."
        )
    return num_blocks


class KVStore:
    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device, ops: Ops) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self._ops = ops
        # Left empty: no slot is read before it was written, and untouched memory of a CPU stays free.
        heads = (shape.num_layers, num_blocks, 2, shape.num_kv_heads, shape.block_size)
        self.tensor = torch.empty((*heads, shape.head_dim), dtype=shape.dtype, device=device)
        self.scales = torch.empty(heads, device=device) if shape.is_quantized else None

    def layer(self, index: int) -> torch.Tensor:
        return self.tensor[index]

    def layer_scales(self, index: int) -> torch.Tensor | None:
        return None if self.scales is None else self.scales[index]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        source, target = torch.tensor(pairs, dtype=torch.int64).unbind(1)
        self._ops.block_copy(self.tensor, source, target, self.scales)


def _free_memory(device: torch.device, num_ranks: int) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free * _CUDA_SHARE) - _WORKSPACE
    return min(int(_available_bytes() * _CPU_SHARE), _CPU_LIMIT) // num_ranks


def _available_bytes() -> int:
    """Memory that could be had without swapping, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ModelError("This system does not say how much memory is free; set the KV memory.")
