"""Weights in panels, and their products with any number of rows.

It knows tensors. It does not know layers. Every output is summed over the inputs in their order, by one lane: a row has
the same bits among any number of others and with any number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cpu import team
from kernels.cpu.compiled import functions
from kernels.cpu.emit import NUM
from kernels.cpu.product import FLOATS, PAIRED, PANEL, TILED, WIDENED
from kernels.cpu.tiles import INPUTS
from kernels.pages import in_large_pages


@dataclass(frozen=True)
class Panels:
    """A weight in panels. `tensor` is float32 `[panels, in_features, 32]` or bfloat16 `[panels, in_features / 2, 32,
    2]`; outputs after the last one are zeros."""

    tensor: torch.Tensor
    in_features: int
    out_features: int
    kind: int

    @property
    def num_panels(self) -> int:
        return len(self.tensor)

    @property
    def input_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.kind in (PAIRED, TILED) else torch.float32


def pack(weight: torch.Tensor, kind: int = WIDENED) -> Panels:
    """Packs `[out_features, in_features]`, float32 or bfloat16; in_features is a multiple of 16. `kind` is that of a
    bfloat16 weight."""
    assert weight.dtype in (torch.float32, torch.bfloat16), weight.dtype
    out_features, in_features = weight.shape
    assert in_features % NUM == 0, weight.shape
    num = -(-out_features // PANEL)
    if rest := num * PANEL - out_features:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, rest))
    if weight.dtype == torch.float32:
        kind, tensor = FLOATS, weight.view(num, PANEL, in_features).transpose(1, 2)
    elif kind == TILED:
        tensor = weight.view(num, 2, NUM, in_features // INPUTS, INPUTS // 2, 2).permute(0, 3, 1, 4, 2, 5)
    else:
        tensor = weight.view(num, PANEL, in_features // 2, 2).transpose(1, 2)
    # Large pages are filled from the view: a copy in between would be the size of the weight.
    return Panels(in_large_pages(tensor).contiguous(), in_features, out_features, kind)


def product(x: torch.Tensor, weight: Panels) -> torch.Tensor:
    """Returns `[num_rows, out_features]` float32 for `x` `[num_rows, in_features]` in the weight's input dtype."""
    assert x.dtype == weight.input_dtype, (x.dtype, weight.kind)
    assert x.dim() == 2 and x.shape[1] == weight.in_features, (x.shape, weight.in_features)
    found, num = functions(), weight.num_panels
    assert found is not None
    x, width = x.contiguous(), num * PANEL
    out = torch.empty((len(x), width))
    threads = team.size()
    counters = torch.zeros(team.LINE + team.stage_bytes(threads), dtype=torch.uint8)
    words = (len(x), weight.kind, x.data_ptr(), x.stride(0) * x.itemsize, weight.in_features, num)
    where = (weight.tensor.data_ptr(), out.data_ptr(), 4 * width, threads, counters.data_ptr())
    team.run(found.multiply, torch.tensor(words + where), threads)
    return out if width == weight.out_features else out[:, : weight.out_features].contiguous()
