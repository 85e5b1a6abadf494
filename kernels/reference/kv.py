"""Plain-torch twins of `kernels.triton.kv_write` and `kernels.triton.block_copy`: writes into KV blocks, and copies of
blocks.

It knows tensors, blocks and slots. It does not know sequences. KV of one layer is `[num_blocks, 2, KVH, block_size,
D]`: K and V of a block side by side, head-major inside it. 8-bit KV has float32 scales `[num_blocks, 2, KVH,
block_size]`, one per token and head, of K and of V (`kernels.reference.quant`).
"""

from __future__ import annotations

import torch

from kernels.arguments.batch import Slots
from kernels.reference.pointwise import rotate
from kernels.reference.quant import bits, quantize


def kv_write(
    kv: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: Slots, kv_scales: torch.Tensor | None = None
) -> None:
    """Stores the keys and values of tokens, `[num_tokens, KVH, D]`, at their slots; quantized if KV is 8-bit."""
    if slots.stored is not None:
        key, value = key[slots.stored], value[slots.stored]
    head_dim = kv.shape[4]
    rows = bits(kv).view(-1, head_dim)
    for target, source in zip(slots.head_rows(kv.shape[2]), (key, value), strict=True):
        if kv_scales is not None:
            source, scales = quantize(source, kv.dtype)
            kv_scales.view(-1).index_copy_(0, target, scales.reshape(-1))
        rows.index_copy_(0, target, bits(source.reshape(-1, head_dim)))


def rope_kv_write(
    kv: torch.Tensor,
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: Slots,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Rotates and stores `qkv` `[num_tokens, (H + 2 KVH) * D]`, the output of a fused projection: the queries are
    rotated in place, the rotated keys and the values are stored at their slots. `norms` has weights `[D]` of an RMSNorm
    over each query and each key head, before the rotation. `table` and `positions` are those of `rope`. Arithmetic is
    in float32, rounded once."""
    kv_heads, head_dim = kv.shape[2], kv.shape[4]
    heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)
    num_heads = heads.shape[1] - 2 * kv_heads
    query, key, value = heads.float().split((num_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        query, key = (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
            for x, weight in zip((query, key), norms, strict=True)
        )
    rows = table[positions]
    heads[:, :num_heads] = rotate(query, rows).to(qkv.dtype)
    key = rotate(key, rows)
    if kv_scales is None:
        key, value = key.to(kv.dtype), value.to(kv.dtype)
    kv_write(kv, key, value, slots, kv_scales)


def block_copy(
    kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor, kv_scales: torch.Tensor | None = None
) -> None:
    """Copies whole blocks in all layers: `kv` is `[num_layers, num_blocks, 2, KVH, block_size, D]`. The two sets of
    ids are disjoint."""
    for tensor in (bits(kv), kv_scales):
        if tensor is not None:
            tensor[:, target] = tensor[:, source]


def gather_blocks(
    staging: torch.Tensor,
    kv: torch.Tensor,
    ids: torch.Tensor,
    staging_scales: torch.Tensor | None = None,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Packs blocks `ids` of all layers: `staging` is `[n, num_layers, 2, KVH, block_size, D]`, its scales
    `[n, num_layers, 2, KVH, block_size]`."""
    for packed, tensor in ((bits(staging), bits(kv)), (staging_scales, kv_scales)):
        if packed is not None:
            assert tensor is not None, "scales to copy into, but none to copy"
            packed.copy_(tensor[:, ids].transpose(0, 1))


def scatter_blocks(
    kv: torch.Tensor,
    staging: torch.Tensor,
    ids: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
    staging_scales: torch.Tensor | None = None,
) -> None:
    """Writes packed blocks back: the reverse of `gather_blocks`; no id occurs twice."""
    for tensor, packed in ((bits(kv), bits(staging)), (kv_scales, staging_scales)):
        if tensor is not None:
            assert packed is not None, "scales to copy into, but none to copy"
            tensor[:, ids] = packed.transpose(0, 1)
