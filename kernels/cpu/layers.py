"""Decoder layers over the tokens of a step, as one call.

Knows tensors: weights in panels, paged KV of a layer, rows. Does not know sequences or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels.cpu import team, tile_attention
from kernels.cpu.attention import scratch_floats
from kernels.cpu.compiled import functions
from kernels.cpu.decoder import STAGES, TILE_BYTES
from kernels.cpu.emit import NUM
from kernels.cpu.panels import Panels
from kernels.cpu.pointwise import SILU
from kernels.cpu.product import PANEL, TILED
from kernels.cpu.words import JOB, LAYER, NUMBERS, PART

PART_LINES = 16
"""Largest number of lines of a part. A step with longer rows stores all keys before attention begins."""
_OWN_LINES = 16
"""Up to this number, each thread norms all lines for itself, which takes less time than waiting for other threads."""
_KV = LAYER.index("kv")


@dataclass(frozen=True)
class LayerWeights:
    """Describes one layer for the compiled function. Norms and biases are float32; the query's and key's norms are
    `[head_dim]`."""

    qkv: Panels
    output: Panels
    gate_up: Panels
    down: Panels
    qkv_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    norm_before: torch.Tensor
    norm_behind: torch.Tensor
    norm_query: torch.Tensor | None
    norm_key: torch.Tensor | None
    turns: torch.Tensor
    """`[positions, head_dim]` float32, the cosines of rotation angles and then their sines."""
    eps_before: float
    eps_behind: float
    eps_heads: float
    scale: float
    window: int
    """Size of the sliding window; 0 means none."""
    norm_attended: torch.Tensor | None = None
    """The norm of what attention adds to the states; None if it is added as it is."""
    norm_fed: torch.Tensor | None = None
    """The same for the gated products."""
    eps_attended: float = 0.0
    eps_fed: float = 0.0
    softcap: float = 0.0
    """Bound of attention's scores; 0 means none."""
    gate: int = SILU


def fits(layer: LayerWeights, kv: torch.Tensor) -> bool:
    """Returns whether the compiled function can run the layer over such KV: sizes have to be multiples of whole panels
    and registers."""
    panels = (layer.qkv, layer.output, layer.gate_up, layer.down)
    return (
        all(weight.out_features % PANEL == 0 for weight in panels)
        and layer.gate_up.num_panels % 2 == 0
        and len({weight.kind for weight in panels}) == 1
        and kv.shape[-1] % NUM == 0
        and kv.dtype in (torch.float32, torch.bfloat16)
    )


class DecoderLayers:
    def __init__(self, layers: Sequence[LayerWeights], heads: int) -> None:
        assert all(layer.turns.dtype == torch.float32 and layer.turns.is_contiguous() for layer in layers)
        self._layers, self._heads = list(layers), heads
        self._adds_normed = any(layer.norm_attended is not None or layer.norm_fed is not None for layer in layers)
        self._is_capped = any(layer.softcap > 0.0 for layer in layers)
        first = layers[0]
        self._hidden, self._inner = first.qkv.in_features, first.down.in_features
        self._input_dtype, self._kind = first.qkv.input_dtype, first.qkv.kind
        self._words = torch.tensor([[_word(layer, name) for name in LAYER] for layer in layers])
        self._numbers = torch.tensor([[getattr(layer, name) for name in NUMBERS] for layer in layers])

    def __call__(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        starts: Sequence[int],
        places: Sequence[int],
        tables: Sequence[torch.Tensor],
        kv: Sequence[torch.Tensor],
        first: int = 0,
    ) -> None:
        """Runs layers. `states` `[num_lines, hidden]` float32, a line for each token, is changed in place. `starts` has
        the first line of each row, and the number of all lines at the end. `places` has the position at which the key
        of a row's first line is stored; those of the others follow, and each line sees all tokens up to its own.
        `tables` has the int64 ids of each row's blocks. `kv` has the KV of each layer from the `first` one on,
        `[num_blocks, 2, KVH, block_size, head_dim]`."""
        _, _, kv_heads, block_size, head_dim = kv[0].shape
        lines, heads, found = len(states), self._heads, functions()
        assert found is not None
        assert states.dtype == torch.float32 and states.is_contiguous(), states.dtype
        assert states.shape[1] == self._hidden and positions.dtype == torch.int64, states.shape
        assert len(positions) == lines == starts[-1], (lines, starts)
        assert len(tables) == len(places) == len(starts) - 1, (len(tables), starts)
        assert all(table.dtype == torch.int64 and table.is_contiguous() for table in tables)
        ends = [p + end - start for p, (start, end) in zip(places, pairwise(starts), strict=True)]
        assert all(len(t) * block_size >= end for t, end in zip(tables, ends, strict=True))
        words, numbers = self._words[first : first + len(kv)], self._numbers[first:]
        words[:, _KV] = torch.tensor([layer.data_ptr() for layer in kv])
        narrow, dtype = kv[0].dtype == torch.bfloat16, self._input_dtype
        parts = _parts(starts, places, tables)
        projected = torch.empty((lines, (heads + 2 * kv_heads) * head_dim))
        attended = torch.empty((lines, heads * head_dim), dtype=dtype)
        gated = torch.empty((lines, self._inner), dtype=dtype)
        added = torch.empty((lines if self._adds_normed else 0, self._hidden))
        shared = lines > _OWN_LINES
        normed = torch.empty((lines if shared else 0, self._hidden), dtype=dtype)
        groups, threads = heads // kv_heads, team.size()
        in_tiles = self._kind == TILED and narrow and not self._is_capped and tile_attention.fits(head_dim, block_size)
        if in_tiles:
            longest = min(PART_LINES, max(end - start for start, end in pairwise(starts)))
            attending = tile_attention.scratch_bytes(groups * longest, head_dim)
        else:
            attending = 4 * (scratch_floats(groups) + 2 * groups * head_dim)
        own = 0 if shared else 4 * lines * self._hidden
        private_bytes = -(-max(own + 2 * TILE_BYTES, attending) // 64) * 64
        private = torch.empty(threads * private_bytes, dtype=torch.uint8)
        stages = STAGES * len(kv) * team.stage_bytes(threads)
        counters = torch.zeros(team.LINE + stages, dtype=torch.uint8)
        job = (
            lines,
            len(parts),
            len(kv),
            self._hidden,
            heads,
            kv_heads,
            head_dim,
            self._inner,
            block_size,
            self._kind,
            narrow,
            words.data_ptr(),
            numbers.data_ptr(),
            states.data_ptr(),
            projected.data_ptr(),
            attended.data_ptr(),
            gated.data_ptr(),
            added.data_ptr(),
            positions.data_ptr(),
            parts.data_ptr(),
            len(parts) > len(places),
            normed.data_ptr() if shared else 0,
            threads,
            counters.data_ptr(),
            private.data_ptr(),
            private_bytes,
            in_tiles,
        )
        assert len(job) == len(JOB)
        team.run(found.decode, torch.tensor(job), threads)


def _parts(starts: Sequence[int], places: Sequence[int], tables: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns `[parts, len(PART)]`: rows cut after every `PART_LINES` lines."""
    found = [
        (first, min(first + PART_LINES, end), place + first - start, table.data_ptr())
        for (start, end), place, table in zip(pairwise(starts), places, tables, strict=True)
        for first in range(start, end, PART_LINES)
    ]
    return torch.tensor(found).view(-1, len(PART))


def _word(layer: LayerWeights, name: str) -> int:
    value = getattr(layer, name, None)
    if isinstance(value, int):
        return value
    if isinstance(value, Panels):
        value = value.tensor
    return 0 if value is None else value.data_ptr()
