"""The KV tensor of a worker: its possible size, one view per layer, copies of whole blocks. 8-bit KV has a second
tensor, which holds scales.

It knows bytes and block ids. It does not know which sequence owns a block, nor what is in one. Block 0 is the null
block: it never holds tokens of a sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.dispatch import Ops
from kernels.reference.quant import bits, is_quantized, quantize
from workers.engine.kv.transport import upload
from workers.engine.sizing import capacity
from workers.engine.sizing.capacity import Need
from workers.engine.values.errors import ModelError
from workers.process.free_memory import free_memory


@dataclass(frozen=True, slots=True)
class KVShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    """The dtype that keys and values are stored in: the model's own, or an 8-bit format."""

    @property
    def is_quantized(self) -> bool:
        return is_quantized(self.dtype)

    @property
    def bytes_per_block(self) -> int:
        heads = self.num_layers * 2 * self.num_kv_heads * self.block_size
        return heads * capacity.kv_head_bytes(self.head_dim, self.dtype.itemsize, self.is_quantized)


def plan_num_blocks(
    need: Need, device: torch.device, max_model_len: int, memory: int | None = None, num_ranks: int = 1
) -> int:
    """Returns the number of blocks that fit into `memory` bytes, the null block included. The default, on a CPU, is a
    share of the free memory, divided among `num_ranks` processes. Raises ModelError with the numbers."""
    if memory is not None:
        return need.num_blocks(memory, memory // need.bytes_per_block, capacity.GIVEN_TERMS)
    assert device.type == "cpu", "a GPU's memory is measured"
    given = capacity.cpu_kv_bytes(available_bytes(), num_ranks)
    most = capacity.most_blocks(max_model_len, need.block_size)
    return need.num_blocks(given, most, capacity.CPU_TERMS)


LayerKV = tuple[torch.Tensor, torch.Tensor | None]
"""Keys and values `[num_blocks, 2, KVH, block_size, head_dim]`, and their scales if they are 8-bit."""


class KVStore:
    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device, ops: Ops) -> None:
        self.shape = shape
        self._ops = ops
        self._device = device
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Gives up what is stored and takes memory for `num_blocks` blocks."""
        shape = self.shape
        self.num_blocks = num_blocks
        # The old memory is freed before the new memory is taken.
        self._layers: list[LayerKV] = []
        self.tensor = torch.empty(0)
        self.scales: torch.Tensor | None = None
        # The tensors are not initialised: no slot is read before it was written, and untouched memory of a CPU stays
        # free.
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
        """Puts noise into the first blocks, for trials before any sequence has tokens there."""
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

    def move_tokens(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies the KV of tokens between slots; each move is a pair (source, destination)."""
        if not moves:
            return
        (ids,) = upload(self._device, array("i", [slot for move in moves for slot in move]))
        source, target = ids.view(-1, 2).to(torch.int64).unbind(1)
        for tensor in (self.tensor, self.scales):
            if tensor is not None:
                _move(bits(tensor), source, target, self.shape.block_size)


def _move(tensor: torch.Tensor, source: torch.Tensor, target: torch.Tensor, size: int) -> None:
    """Moves tokens of `[num_layers, num_blocks, 2, KVH, block_size, ...]`; all sources are read before any target is
    written."""
    found = tensor[:, source // size, :, :, source % size]
    tensor[:, target // size, :, :, target % size] = found


def available_bytes() -> int:
    """Returns the bytes of memory that are available without swapping. Raises ModelError if the kernel does not say."""
    found = free_memory()
    if found is None:
        raise ModelError("This system does not say how much memory is free; set the KV memory.")
    return found
