"""Decoder layers over the tokens of a step, as one call.

It knows tensors: weights in panels, paged KV of a layer, rows. It does not know sequences or models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels.cpu import team, tile_attention
from kernels.cpu.attention import scratch_floats
from kernels.cpu.compiled import functions
from kernels.cpu.decoder import STAGES
from kernels.cpu.emit import NUM
from kernels.cpu.feed import TILE_BYTES
from kernels.cpu.panels import Panels
from kernels.cpu.pointwise import SILU
from kernels.cpu.product import PANEL, TILED
from kernels.cpu.words import JOB, LAYER, NUMBERS, PART

PART_LINES = 16
"""Largest number of lines of a part. A step with longer rows stores all keys before attention begins."""
_OWN_LINES = 16
"""Up to this number, each thread norms all lines for itself, which takes less time than waiting for other threads."""
_KV = LAYER.index("kv")
_NO_EXPERTS = (0,) * (len(JOB) - JOB.index("experts"))


@dataclass(frozen=True)
class LayerWeights:
    """Describes one layer for the compiled function. Norms and biases are float32; the query's and key's norms are
    `[head_dim]`."""

    qkv: Panels
    output: Panels
    gate_up: Panels
    """The gate's product, and behind it the product that it is multiplied by, unless the layer has none."""
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
    """`[positions, turned]` float32, the cosines of rotation angles and then their sines. It rotates the first `turned`
    columns of a head."""
    eps_before: float
    eps_behind: float
    eps_heads: float
    scale: float
    window: int
    """Size of the sliding window; 0 means none."""
    norm_attended: torch.Tensor | None = None
    """The norm of what attention adds to the states; None if it is added as it is."""
    norm_fed: torch.Tensor | None = None
    """The norm of what the gated products add to the states; None if it is added as it is."""
    eps_attended: float = 0.0
    eps_fed: float = 0.0
    softcap: float = 0.0
    """Bound of attention's scores; 0 means none."""
    gate: int = SILU
    gated: bool = True
    norm_before_bias: torch.Tensor | None = None
    """A norm with a bias is a LayerNorm, one without is an RMSNorm."""
    norm_behind_bias: torch.Tensor | None = None
    parallel: bool = False
    """The gate takes the layer's input, as attention does, instead of the states with what attention adds."""

    router: Panels | None = None
    """The product that scores experts, if the layer has any: `gate_up` and `down` hold a weight for each of them."""
    chosen: int = 0
    """Experts of a token."""
    renormalised: bool = True
    """The shares of a token's experts add up to 1."""

    @property
    def turned(self) -> int:
        return self.turns.shape[1]

    @property
    def inner(self) -> int:
        return self.down.in_features

    @property
    def experts(self) -> int:
        return 0 if self.router is None else self.router.out_features


def fits(layer: LayerWeights, kv: torch.Tensor) -> bool:
    """Returns whether the compiled function can run the layer over such KV: sizes have to be multiples of whole panels
    and registers."""
    panels = (layer.qkv, layer.output, layer.gate_up, layer.down)
    kinds = {weight.kind for weight in (*panels, layer.router or layer.qkv)}
    hidden, inner, number = layer.qkv.in_features, layer.inner, layer.experts or 1
    has_more = layer.parallel or layer.gate_up_bias is not None or layer.norm_fed is not None
    return (
        layer.qkv.out_features % PANEL == hidden % PANEL == inner % PANEL == 0
        and layer.output.out_features == hidden
        and layer.down.out_features == number * hidden
        and layer.gate_up.out_features == number * (2 if layer.gated else 1) * inner
        and not (layer.experts and has_more)
        and len(kinds) == 1
        and kv.shape[-1] % NUM == 0
        and kv.dtype in (torch.float32, torch.bfloat16)
    )


def alike(layers: Sequence[LayerWeights]) -> bool:
    """Returns whether layers that have experts have equally many of them, which is what a call can take."""
    return len({(layer.experts, layer.chosen) for layer in layers if layer.experts}) <= 1


class _ExpertMemory:
    """Memory of a call for what its layers with experts compute."""

    def __init__(self, lines: int, hidden: int, experts: int, chosen: int, dtype: torch.dtype) -> None:
        self._experts, self._chosen, self._score_panels = experts, chosen, -(-experts // PANEL)
        pairs = lines * chosen
        self._memory = (
            torch.empty(lines * PANEL * self._score_panels),
            torch.empty(pairs),
            torch.empty(pairs, dtype=torch.int64),
            torch.empty(1 + experts, dtype=torch.int64),
            torch.empty(2 * experts + 1, dtype=torch.int64),
            torch.empty(pairs, dtype=torch.int64),
            torch.empty(pairs * hidden, dtype=dtype),
            torch.empty(pairs * hidden),
        )

    def words(self) -> tuple[int, ...]:
        return self._experts, self._chosen, self._score_panels, *(tensor.data_ptr() for tensor in self._memory)


class DecoderLayers:
    def __init__(self, layers: Sequence[LayerWeights], heads: int) -> None:
        assert all(layer.turns.dtype == torch.float32 and layer.turns.is_contiguous() for layer in layers)
        self._layers, self._heads = list(layers), heads
        self._adds_normed = any(layer.norm_attended is not None or layer.norm_fed is not None for layer in layers)
        self._is_capped = any(layer.softcap > 0.0 for layer in layers)
        first = layers[0]
        self._hidden = first.qkv.in_features
        self._fed = max(layer.inner * max(layer.chosen, 1) for layer in layers)
        of_experts = {(layer.experts, layer.chosen) for layer in layers if layer.experts}
        assert len(of_experts) <= 1, "`alike` looks for others"
        self._experts, self._chosen = of_experts.pop() if of_experts else (0, 0)
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
        fed = torch.empty(lines * self._fed, dtype=dtype)
        experts = _ExpertMemory(lines, self._hidden, self._experts, self._chosen, dtype) if self._experts else None
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
            block_size,
            self._kind,
            narrow,
            words.data_ptr(),
            numbers.data_ptr(),
            states.data_ptr(),
            projected.data_ptr(),
            attended.data_ptr(),
            fed.data_ptr(),
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
            *(_NO_EXPERTS if experts is None else experts.words()),
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
