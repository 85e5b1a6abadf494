"""Made-up decode rows, for what happens before the first request: recordings, their comparison, and the measurement of
memory.

It knows device rows, static buffers and KV blocks. It does not know what a pass computes from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from workers.engine.device.device_rows import Field, RowStore
from workers.engine.device.graph_buffers import StaticBatch
from workers.engine.device.graphs import Bucket
from workers.engine.kv.kv_store import KVStore

_SHARED_BLOCKS = 40
"""Number of context blocks that all made-up rows read; they are longer than one split of decode attention."""
_NUMBERS = ((0.0, 1.0, 0.0, 0), (0.8, 0.9, 0.0, 20), (1.3, 1.0, 0.05, 0))
"""Temperature, top-p, min-p and top-k of made-up draws, in turn."""


class MadeUpRows:
    """Decode rows with noise as KV. At most `max_context` tokens stand before the one that is fed in. `set_context`
    gets the size of a step and the contexts of its rows. The last row of a step is padding if there is more than
    one."""

    def __init__(
        self,
        rows: RowStore,
        static: StaticBatch,
        store: KVStore,
        max_context: int,
        vocab_size: int,
        set_context: Callable[[int, Sequence[int]], None],
    ) -> None:
        self._rows = rows
        self._static = static
        self._store = store
        self._max_context = max_context
        self._vocab_size = vocab_size
        self._set_context = set_context

    def prepare(self, size: int) -> None:
        """Prepares rows with shared context blocks and a last block of their own; equal sizes give equal rows."""
        number, shared = self._extent(size)
        device, block_size = self._store.tensor.device, self._store.shape.block_size
        generator = torch.Generator(device).manual_seed(size)
        self._store.randomise(1 + shared + number, generator)
        index = torch.arange(number, device=device, dtype=torch.int32)
        state, table = self._rows.state, self._rows.block_table
        state[Field.LAST_TOKEN, :number] = index * 7 % self._vocab_size
        positions = [min(shared * block_size + row % block_size, self._max_context) for row in range(number)]
        state[Field.POSITION, :number] = torch.tensor(positions, dtype=torch.int32, device=device)
        numbers = torch.tensor(_NUMBERS, device=device).T[:, index % len(_NUMBERS)]
        state[Field.TEMPERATURE : Field.TOP_K, :number] = numbers[:3].contiguous().view(torch.int32)
        state[Field.TOP_K, :number] = numbers[3].to(torch.int32)
        state[Field.SEED_LOW, :number] = index
        table[:number, :shared] = torch.arange(1, 1 + shared, dtype=torch.int32, device=device)
        table[:number, shared] = 1 + shared + index
        self._static.active[:number] = index
        self._static.active[number:size] = -1
        self._static.gather_draws(state, size)
        self._set_context(size, positions)

    def outcome(self, bucket: Bucket) -> list[torch.Tensor]:
        """Returns the logits, the tokens, and what the device rows hold afterwards, for rows that are no padding."""
        self.prepare(bucket.size)
        number, _ = self._extent(bucket.size)
        bucket.forward()
        logits = self._static.logits[:number].clone()
        bucket.draw()
        return [logits, self._static.drawn[:number].clone(), self._rows.state[:, :number].clone()]

    def _extent(self, size: int) -> tuple[int, int]:
        """Returns the number of rows that are no padding, and the number of blocks that all of them read."""
        blocks = self._store.num_blocks - 1
        number = min(max(1, size - 1), self._rows.state.shape[1], blocks)
        whole = self._max_context // self._store.shape.block_size
        return number, max(0, min(_SHARED_BLOCKS, whole - 1, blocks - number))
