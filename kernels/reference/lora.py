"""Plain-torch twin of `kernels.triton.products.lora`: low-rank additions to a linear layer, chosen for each token.

It knows stacked adapters and token rows. It does not know tenants, or where adapters come from.
"""

from __future__ import annotations

import torch

from kernels.reference.group_rows import RowGroups

TILE = 16
"""Rows of a tile of tokens of one adapter: the smallest tile of the matrix unit."""
MAX_RANK = 64
MAX_PARTS = 3
MAX_SPLITS = 8


def lora(
    out: torch.Tensor,
    x: torch.Tensor,
    shrink: torch.Tensor,
    expand: torch.Tensor,
    groups: RowGroups,
    part_ends: tuple[int, ...],
    workspace: torch.Tensor | None = None,
) -> None:
    """Adds `expand[a]` (`shrink[a]` x) to the rows of `out` `[num_tokens, out_features]` whose adapter is a.

    A group of projections over one `x` has parts (query, key, value): part p ends before output column `part_ends[p]`
    and has its own pair. `shrink` is `[num_adapters, parts, rank, in_features]`; `expand` is `[num_adapters,
    out_features, rank]`, with the adapter's alpha / rank multiplied in; lower ranks are padded with zeros. `groups` has
    the adapter of each token (-1 means none), grouped once per step with tiles of TILE. The inner product is rounded to
    the type of `x`. `workspace`: see `workspace_size`."""
    for adapter in range(len(shrink)):
        rows = (groups.ids == adapter).nonzero().squeeze(1)
        first = 0
        for part, end in enumerate(part_ends):
            inner = (x[rows].float() @ shrink[adapter, part].float().T).to(x.dtype)
            added = inner.float() @ expand[adapter, first:end].float().T
            out[rows, first:end] = (out[rows, first:end].float() + added).to(out.dtype)
            first = end


def workspace_size(num_tokens: int, num_parts: int, rank: int) -> int:
    """Returns the float32 elements of the partial sums of the inner products."""
    return MAX_SPLITS * num_tokens * num_parts * rank
