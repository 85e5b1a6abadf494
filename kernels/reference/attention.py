"""Plain-torch twins of the attention kernels: the oracle in tests and the path of a CPU worker.

Knows tensors, blocks and slots. Does not know weights, sequences or requests. KV of one layer is
`[num_blocks, 2, num_kv_heads, block_size, head_dim]`: K and V of a block side by side, head-major inside it.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from kernels.batch import PagedBatch


def attention_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """One query per row, `[num_rows, H, D]`. The G query heads of a KV head are the rows of one product, so that K
    and V are read once."""
    kv_heads, head_dim = kv.shape[2], kv.shape[4]
    groups = query.shape[1] // kv_heads
    sinks = None if sinks is None else sinks.view(1, kv_heads, groups, 1)
    for row in range(batch.num_rows):
        keys, values = _gather(kv, batch, row, window)
        # A row with one query sees all its keys from the window's first one on: slicing, no mask.
        seen = batch.context_lens[row] + 1
        skip = max(0, seen - window) - batch.first_key(row, window) if window else 0
        packed = query[row].view(1, kv_heads, groups, head_dim)
        keys, values = keys[None, :, skip:], values[None, :, skip:]
        result = _attend(packed, keys, values, None, False, scale, softcap, sinks)
        out[row] = result.view(kv_heads * groups, head_dim)


def attention_prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Chunks, packed `[num_tokens, H, D]`, over the blocks that already hold their context and their own keys."""
    kv_heads, head_dim = kv.shape[2], kv.shape[4]
    groups = query.shape[1] // kv_heads
    sinks = None if sinks is None else sinks.view(kv_heads, groups, 1, 1)
    for row in range(batch.num_rows):
        start, length = batch.starts[row], batch.query_lens[row]
        keys, values = _gather(kv, batch, row, window)
        # KV heads stand where a batch would, repeated over their query heads with stride 0: nothing is copied.
        repeated = (kv_heads, groups, *keys.shape[1:])
        packed = query[start : start + length].view(length, kv_heads, groups, head_dim)
        causal = batch.context_lens[row] == 0 and window == 0 and softcap == 0.0 and sinks is None
        result = _attend(
            packed.permute(1, 2, 0, 3),
            keys[:, None].expand(repeated),
            values[:, None].expand(repeated),
            None if causal else batch.mask(row, window),
            causal,
            scale,
            softcap,
            sinks,
        )
        out[start : start + length] = result.permute(2, 0, 1, 3).reshape(length, -1, head_dim)


def _gather(
    kv: torch.Tensor, batch: PagedBatch, row: int, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a row, each `[KVH, tokens, D]` and contiguous per head, from `first_key` to its last token."""
    num_blocks, _, kv_heads, block_size, head_dim = kv.shape
    rows = kv.view(num_blocks * 2 * kv_heads, block_size * head_dim)
    gathered = rows.index_select(0, batch.kv_row_ids(row, kv_heads, window))
    end = batch.context_lens[row] + batch.query_lens[row] - batch.first_key(row, window)
    keys, values = gathered.view(2, kv_heads, -1, head_dim)[:, :, :end]
    return keys, values


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    if softcap == 0.0 and sinks is None:
        return F.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, is_causal=causal, scale=scale
        )
    scores = (query @ keys.transpose(-1, -2)).float() * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:  # a learned logit per head that takes weight and gives no value
        column = sinks.float().expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return weights.to(values.dtype) @ values
