"""Plain-torch twins of the attention kernels: the oracle in tests and the path of a CPU worker.

It knows tensors, blocks and slots. It does not know weights, sequences or requests. KV of one layer is
`[num_blocks, 2, num_kv_heads, block_size, head_dim]`: K and V of a block side by side, head-major inside it.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.arguments.batch import PagedBatch
from kernels.arguments.shared import SharedGroups
from kernels.reference import chunks
from kernels.reference.quant import widen


def attention_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> None:
    """Computes decode attention with one query per row, `[num_rows, H, D]`. The G query heads of a KV head are the rows
    of one product, so that K and V are read once.

    `kv_scales`, `[num_blocks, 2, KVH, block_size]` float32, goes with int8 or float8 KV: value = number * scale.
    `lse`, `[num_rows, H]` float32, receives the natural logarithm of the sum of the exponentials of a row's scores,
    its sink's among them. A padding row has context -1 and no blocks: it gets zeros, and -inf (or its sink).
    """
    if kv_scales is None and lse is None and min(batch.context_lens, default=0) >= 0:
        _decode_plain(out, query, kv, batch, scale, window, softcap, sinks)
    else:
        own_starts = [0] * batch.num_rows
        told = torch.empty(query.shape[:2], device=query.device) if lse is None else lse
        _decode_states(out, told, query, kv, batch, own_starts, scale, window, softcap, sinks, kv_scales)


def _decode_plain(
    out: torch.Tensor,
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> None:
    """Computes decode attention as a CPU worker uses it."""
    kv_heads, head_dim = kv.shape[2], kv.shape[4]
    if not window and not softcap and sinks is None and chunks.CHUNK % batch.block_size == 0:
        chunks.attend(out, query, kv, batch.derived(chunks.ChunkPlan, kv_heads, head_dim), scale)
        return
    groups = query.shape[1] // kv_heads
    sinks = None if sinks is None else sinks.view(1, kv_heads, groups, 1)
    for row in range(batch.num_rows):
        keys, values = (x.to(query.dtype) for x in _gather(kv, batch, row, window))
        # A row with one query sees all its keys from the window's first one on: slicing, no mask.
        seen = batch.context_lens[row] + 1
        skip = max(0, seen - window) - batch.first_key(row, window) if window else 0
        packed = query[row].view(1, kv_heads, groups, head_dim)
        keys, values = keys[None, :, skip:], values[None, :, skip:]
        result = _attend(packed, keys, values, None, False, scale, softcap, sinks)
        out[row] = result.reshape(kv_heads * groups, head_dim)


def _decode_states(
    out: torch.Tensor,
    lse: torch.Tensor,
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    own_starts: list[int],
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    kv_scales: torch.Tensor | None,
) -> None:
    """Computes decode attention in float32, over keys from `own_starts` on, with log-sum-exp."""
    for row, own_start in enumerate(own_starts):
        seen = batch.context_lens[row] + 1
        first = max(own_start, seen - window if window else 0)
        keys, values = _gather_wide(kv, batch.block_tables[row], seen, kv_scales)
        keys, values = keys[:, first:], values[:, first:]
        out[row], lse[row] = _attend_state(query[row : row + 1], keys, values, scale, softcap, sinks)


def attention_shared(
    out: torch.Tensor,
    query: torch.Tensor,
    kv: torch.Tensor,
    batch: PagedBatch,
    groups: SharedGroups,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Does the same as `attention_decode`, but the blocks that rows of a group share are read once for all of them:
    attention over the shared tokens and attention over each row's own ones are merged. Source: Hydragen (arXiv
    2402.05099), RelayAttention (arXiv 2402.14808)."""
    own = torch.empty(query.shape, device=query.device)
    own_lse = torch.empty(query.shape[:2], device=query.device)
    own_starts = groups.own_starts.tolist()
    _decode_states(own, own_lse, query, kv, batch, own_starts, scale, 0, softcap, sinks, kv_scales)
    starts, shared_lens = groups.starts.tolist(), groups.shared_lens.tolist()
    for group, shared_len in enumerate(shared_lens):
        rows = groups.order[starts[group] : starts[group + 1]].long()
        blocks = groups.block_table[group, : -(-shared_len // batch.block_size)].long()
        keys, values = _gather_wide(kv, blocks, shared_len, kv_scales)
        state = _attend_state(query[rows], keys, values, scale, softcap, None)
        own[rows], own_lse[rows] = merge_states(*state, own[rows], own_lse[rows])
    out.copy_(own)


def merge_states(
    out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merges attention over two disjoint sets of keys, `[rows, H, D]` and `[rows, H]` each, into attention over both.
    Either set may be empty (-inf). Source: the running softmax of FlashAttention (arXiv 2205.14135), applied once."""
    merged = torch.logaddexp(lse, other_lse)
    safe = merged.masked_fill(merged == float("-inf"), 0.0)
    mine, others = (lse - safe).exp()[..., None], (other_lse - safe).exp()[..., None]
    return out * mine + other * others, merged


def _gather_wide(
    kv: torch.Tensor, blocks: torch.Tensor, num_tokens: int, kv_scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K and V of the first tokens of some blocks in float32, each `[KVH, tokens, D]`."""
    wide = widen(kv.index_select(0, blocks))
    if kv_scales is not None:
        wide = wide * kv_scales.index_select(0, blocks)[..., None]
    _, _, kv_heads, _, head_dim = kv.shape
    keys, values = wide.permute(1, 2, 0, 3, 4).reshape(2, kv_heads, -1, head_dim)[:, :, :num_tokens]
    return keys, values


def _attend_state(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns result and log-sum-exp of queries `[rows, H, D]` that all see the keys `[KVH, tokens, D]`, which may be
    none."""
    rows, heads, head_dim = query.shape
    kv_heads = len(keys)
    packed = query.float().view(rows, kv_heads, heads // kv_heads, head_dim).transpose(0, 1)
    scores = packed.reshape(kv_heads, -1, head_dim) @ keys.transpose(1, 2) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    lse = scores.logsumexp(dim=-1)
    if sinks is not None:  # a learned logit per head that takes weight and gives no value
        taken = sinks.float().view(kv_heads, 1, -1).expand(kv_heads, rows, heads // kv_heads)
        lse = torch.logaddexp(lse, taken.reshape(kv_heads, -1))
    result = (scores - lse[..., None]).exp() @ values

    def unpacked(x: torch.Tensor) -> torch.Tensor:
        return x.view(kv_heads, rows, -1, x.shape[-1]).transpose(0, 1).reshape(rows, heads, -1)

    return unpacked(result), unpacked(lse[..., None]).squeeze(-1)


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
    """Computes prefill attention of chunks, packed `[num_tokens, H, D]`, over the blocks that already hold their
    context and their own keys: a token sees its context and the chunk up to itself (within the `window`, if that is not
    0).

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
        packed = query[start : start + length].view(length, kv_heads, groups, head_dim)
        if kv_scales is None:
            keys, values = (x.to(query.dtype) for x in _gather(kv, batch, row, window))
        else:
            seen, first = batch.context_lens[row] + length, batch.first_key(row, window)
            keys, values = _gather_wide(kv, batch.block_tables[row], seen, kv_scales)
            keys, values, packed = keys[:, first:], values[:, first:], packed.float()
        # KV heads take the batch dimension, repeated over their query heads with stride 0: nothing is copied.
        repeated = (kv_heads, groups, *keys.shape[1:])
        causal = batch.context_lens[row] == 0 and not special
        mask = None if causal else batch.mask(row, window)
        if tree is not None:
            assert mask is not None, "a tree is special, and what is special has a mask"
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


def _gather(kv: torch.Tensor, batch: PagedBatch, row: int, window: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns K and V of a row, each `[KVH, tokens, D]` and contiguous per head, from `first_key` to its last token."""
    num_blocks, _, kv_heads, block_size, head_dim = kv.shape
    rows = kv.view(num_blocks * 2 * kv_heads, block_size * head_dim)
    gathered = rows.index_select(0, batch.kv_row_ids(row, kv_heads, window))
    end = batch.context_lens[row] + batch.query_lens[row] - batch.first_key(row, window)
    keys, values = gathered.view(2, kv_heads, -1, head_dim)[:, :, :end]
    return keys, values


def _narrowed(mask: torch.Tensor, tree: torch.Tensor) -> torch.Tensor:
    """Returns a chunk's causal mask without those of its own tokens that `tree` does not include."""
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
        # On a GPU torch's memory-efficient kernel gave wrong results for 513 queries with a mask (torch 2.11, H200).
        with nullcontext() if query.device.type == "cpu" else sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, is_causal=causal, scale=scale)
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
