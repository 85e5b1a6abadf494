"""Plain-torch twins of the attention and KV kernels: the oracle in tests and the path of a CPU worker.

Knows tensors, blocks and slots. Does not know weights, sequences or requests. KV of one layer is
`[num_blocks, 2, num_kv_heads, block_size, head_dim]`: K and V of a block side by side, head-major inside it.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from kernels.batch import PagedBatch, Slots


def kv_write(kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: Slots) -> None:
    """Stores the keys and values of tokens, `[num_tokens, KVH, D]`, at their slots."""
    if slots.stored is not None:
        key, value = key[slots.stored], value[slots.stored]
    head_dim = kv.shape[4]
    rows = kv.view(-1, head_dim)
    for target, source in zip(slots.head_rows(kv.shape[2]), (key, value), strict=True):
        rows.index_copy_(0, target, source.reshape(-1, head_dim))


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
    kv_scales: torch.Tensor | None = None,
    tree: torch.Tensor | None = None,
) -> None:
    """Chunks, packed `[num_tokens, H, D]`, over the blocks that already hold their context and their own keys: a
    token sees its context and the chunk up to itself (within the `window`, if that is not 0).

    `kv_scales`, `[num_blocks, 2, KVH, block_size]` float32, goes with int8 or float8 KV: value = number * scale.
    `tree`, `[num_tokens]` int64, for chunks of at most 64 tokens: bit i says that a token sees token i of its chunk,
    which is itself or an earlier one. A padding row has context -query_len and no blocks: it gets zeros.
    """
    kv_heads, head_dim = kv.shape[2], kv.shape[4]
    groups = query.shape[1] // kv_heads
    sinks = None if sinks is None else sinks.view(kv_heads, groups, 1, 1)
    special = bool(window or softcap) or sinks is not None or tree is not None
    for row in range(batch.num_rows):
        start, length = batch.starts[row], batch.query_lens[row]
        if batch.context_lens[row] + length == 0:
            out[start : start + length] = 0.0
        if length == 0 or batch.context_lens[row] < 0:
            continue
        keys, values = _gather(kv, batch, row, window)
        packed = query[start : start + length].view(length, kv_heads, groups, head_dim)
        if kv_scales is not None:
            keys, values = _dequantize(keys, values, kv_scales, batch, row, window)
            packed = packed.float()
        # KV heads stand where a batch would, repeated over their query heads with stride 0: nothing is copied.
        repeated = (kv_heads, groups, *keys.shape[1:])
        causal = batch.context_lens[row] == 0 and not special
        mask = None if causal else batch.mask(row, window)
        if tree is not None:
            mask = _narrowed(mask, tree[start : start + length])
        result = _attend(
            packed.permute(1, 2, 0, 3),
            keys[:, None].expand(repeated),
            values[:, None].expand(repeated),
            mask,
            causal,
            scale,
            softcap,
            sinks,
        )
        out[start : start + length] = result.permute(2, 0, 1, 3).reshape(length, -1, head_dim)


def block_copy(kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies whole blocks in all layers: `kv` is `[num_layers, num_blocks, 2, KVH, block_size, D]`. The two sets of
    ids are disjoint."""
    kv[:, target] = kv[:, source]


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


def _dequantize(
    keys: torch.Tensor,
    values: torch.Tensor,
    kv_scales: torch.Tensor,
    batch: PagedBatch,
    row: int,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `_gather` gave, in float32."""
    kv_heads, block_size = kv_scales.shape[2:]
    ids = batch.kv_row_ids(row, kv_heads, window)
    factors = kv_scales.view(-1, block_size).index_select(0, ids).view(2, kv_heads, -1, 1)
    of_keys, of_values = factors[:, :, : keys.shape[1]]
    return keys.float() * of_keys, values.float() * of_values


def _narrowed(mask: torch.Tensor, tree: torch.Tensor) -> torch.Tensor:
    """A chunk's causal mask without those of its own tokens that `tree` does not name."""
    length = len(tree)
    named = (tree[:, None] >> torch.arange(length, device=tree.device)) & 1
    narrowed = mask.clone()
    narrowed[:, mask.shape[1] - length :] &= named.bool()
    return narrowed


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
