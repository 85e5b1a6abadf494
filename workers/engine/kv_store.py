"""The KV tensor of a worker: how large it may be, one view per layer, copies of whole blocks. 8-bit KV has a second
tensor, of scales.

Knows bytes and block ids. Does not know which sequence owns a block, nor what is in one. Block 0 is the null block:
nobody's tokens are ever there.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.dispatch import Ops
from kernels.reference.quant import bits, is_quantized, quantize
from workers.engine.errors import ModelError
from workers.engine.transport import upload

_CPU_SHARE, _CPU_LIMIT = 0.10, 2 << 30
"""A CPU worker shares its memory with everything else on the machine."""
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
    """Blocks that fit into `memory` bytes, the null block included. Default, on a CPU: a share of what is free, of
    which `num_ranks` processes each take their part."""
    given = memory
    if given is None:
        assert device.type == "cpu", "a GPU's memory is measured"
        given = min(int(_available_bytes() * _CPU_SHARE), _CPU_LIMIT) // num_ranks
    num_blocks = given // shape.bytes_per_block
    if memory is None:
        num_blocks = min(num_blocks, most_blocks(shape, max_model_len))
    if num_blocks < 2:
        raise ModelError(
            f"{given} bytes are not enough for KV: one block needs {shape.bytes_per_block} bytes."
        )
    return num_blocks


def most_blocks(shape: KVShape, max_model_len: int) -> int:
    return 1 + _MAX_FULL_SEQUENCES * -(-max_model_len // shape.block_size)


LayerKV = tuple[torch.Tensor, torch.Tensor | None]
"""Numbers `[num_blocks, 2, KVH, block_size, head_dim]`, and their scales where they are 8-bit."""


class KVStore:
    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device, ops: Ops) -> None:
        self.shape = shape
        self._ops = ops
        self._device = device
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Gives up what is stored and takes memory for so many blocks."""
        shape = self.shape
        self.num_blocks = num_blocks
        # The old memory goes before the new is taken.
        self._layers: list[LayerKV] = []
        self.tensor = torch.empty(0)
        self.scales: torch.Tensor | None = None
        # Left empty: no slot is read before it was written, and untouched memory of a CPU stays free.
        heads = (shape.num_layers, num_blocks, 2, shape.num_kv_heads, shape.block_size)
        self.tensor = torch.empty((*heads, shape.head_dim), dtype=shape.dtype, device=self._device)
        if shape.is_quantized:
            self.scales = torch.empty(heads, device=self._device)
        for index in range(shape.num_layers):
            scales = None if self.scales is None else self.scales[index]
            self._layers.append((self.tensor[index], scales))

    def layer(self, index: int) -> LayerKV:
        return self._layers[index]

    def randomise(self, num_blocks: int, generator: torch.Generator) -> None:
        """Puts noise into the first blocks, for trials before anybody's tokens are there."""
        shape = (self.shape.num_layers, num_blocks, *self.tensor.shape[2:])
        noise = torch.randn(shape, generator=generator, device=self._device)
        if self.scales is None:
            self.tensor[:, :num_blocks] = noise.to(self.shape.dtype)
        else:
            numbers, self.scales[:, :num_blocks] = quantize(noise, self.shape.dtype)
            bits(self.tensor)[:, :num_blocks] = bits(numbers)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        flat = array("i", [block for pair in pairs for block in pair])
        (ids,) = upload(self._device, flat)
        source, target = ids.view(-1, 2).to(torch.int64).unbind(1)
        self._ops.block_copy(self.tensor, source, target, self.scales)


def _available_bytes() -> int:
    """Memory that could be had without swapping, as the kernel estimates it."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ModelError("This system does not say how much memory is free; set the KV memory.")
