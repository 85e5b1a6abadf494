"""The parts of prefill attention: a program finds its row, adds runs of keys to a tile of lanes, and merges splits.

It knows one tile. `attention_prefill` defines lanes, combines the parts and launches them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.attention.attention_tiles import NOTHING, split_size_of

SHORT_LANES = 32
"""Most lanes of a short row: 8 tokens of 4 heads. The partial sums of longer rows would cost more than splitting
saves."""
SHORT = tl.constexpr(SHORT_LANES)


@triton.jit
def row_of(query_starts, num_rows, tile, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Returns the row that owns a tile: the last one whose first tile, `start * G // ROWS + row`, is not behind it."""
    low = tile * 0
    high = low + num_rows
    while low < high:
        middle = (low + high) // 2
        before = tl.load(query_starts + middle) * GROUP // ROWS + middle <= tile
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    return low - 1


@triton.jit
def first_key(position, window, TOKENS: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Returns the first key that a query at `position` may see, rounded down to a tile."""
    first = position * 0
    if HAS_WINDOW:
        first = tl.maximum(position + 1 - window, 0) // TOKENS * TOKENS
    return first


@triton.jit
def blocks_of(table, first, end, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    key = first + tl.arange(0, TOKENS)
    return tl.load(table + key // BLOCK_SIZE, mask=key < end, other=0)


@triton.jit
def _load(place, inside, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MASKED: tl.constexpr):
    """Returns `[TOKENS, DIM]` of K or V; without a mask where every key and every column is there."""
    if not MASKED and HEAD_DIM == DIM:
        tile = tl.load(place)
    else:
        mask = (tl.arange(0, DIM) < HEAD_DIM)[None, :]
        if MASKED:
            mask = inside[:, None] if HEAD_DIM == DIM else mask & inside[:, None]
        tile = tl.load(place, mask=mask, other=0.0)
    return tile


@triton.jit
def _sees(position, key, nodes, context, window, HAS_WINDOW: tl.constexpr):
    """Returns `[ROWS, TOKENS]`: whether a lane may look at a key."""
    sees = key[None, :] <= position[:, None]
    if HAS_WINDOW:
        sees &= key[None, :] > position[:, None] - window
    if nodes is not None:  # bit i: token i of the chunk
        node = tl.minimum(tl.maximum(key - context, 0), 63).to(tl.int64)
        sees &= (key < context)[None, :] | (((nodes[:, None] >> node[None, :]) & 1) != 0)
    return sees


@triton.jit
def attend(
    sums,
    peak,
    total,
    blocks,
    query,
    position,
    nodes,
    context,
    kv,
    scales,
    table,
    first,
    last,
    end,
    kv_head,
    factor,
    cap,
    window,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    QUANTIZED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Takes the keys first...last into the weighted values, the largest score in base 2 and the sum of probabilities.
    `blocks` are the ids for the tile at `first`: each pass loads those of the next, up to `end`, so that K and V never
    wait for them. MASKED: some lane may not see some key."""
    half: tl.constexpr = KV_HEADS * BLOCK_SIZE  # slots from a key to its value
    for begin in tl.range(first, last, TOKENS):
        key = begin + tl.arange(0, TOKENS)
        inside = key < end
        offset = key % BLOCK_SIZE
        if TOKENS % BLOCK_SIZE == 0:  # a tile begins with a block
            offset = tl.arange(0, TOKENS) % BLOCK_SIZE
        block = blocks * (2 * KV_HEADS) + kv_head
        slot = block.to(tl.int64) * BLOCK_SIZE + offset
        place = kv + slot[:, None] * HEAD_DIM + tl.arange(0, DIM)[None, :]
        blocks = blocks_of(table, begin + TOKENS, end, TOKENS, BLOCK_SIZE)
        keys = _load(place, inside, HEAD_DIM, DIM, MASKED).to(query.dtype)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
        unit = factor
        if QUANTIZED:
            scale = tl.load(scales + block * BLOCK_SIZE + offset, mask=inside, other=0.0)
            scores *= (factor * scale)[None, :]
            unit = 1.0
        if HAS_CAP:  # cap * tanh(x) = cap * (2s(2x) - 1), s the sigmoid; `factor` holds 2 / cap
            scores = (2.0 / (1.0 + tl.exp2(-scores * unit)) - 1.0) * cap
            unit = 1.0
        if MASKED:
            sees = _sees(position, key, nodes, context, window, HAS_WINDOW)
            scores = tl.where(sees, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * unit)
        weights = tl.exp2(scores * unit - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        if QUANTIZED:
            weights *= tl.load(scales + half + block * BLOCK_SIZE + offset, mask=inside, other=0.0)[None, :]
        values = _load(place + half * HEAD_DIM, inside, HEAD_DIM, DIM, MASKED)
        sums *= fade[:, None]
        sums = tl.dot(weights.to(query.dtype), values.to(query.dtype), sums, input_precision="ieee")
        peak = new_peak
    return sums, peak, total, blocks


@triton.jit
def partial_slot(row, kv_head, split, lane, num_splits, num_lanes, KV_HEADS: tl.constexpr):
    """Returns the index into partial sums `[num_rows, KVH, num_splits, num_lanes]`."""
    return ((row.to(tl.int64) * KV_HEADS + kv_head) * num_splits + split) * num_lanes + lane


@triton.jit(do_not_specialize=["window", "num_splits", "num_lanes"])
def merge(
    out,
    partial_sums,
    partial_stats,
    seq_lens,
    query_starts,
    window,
    num_splits,
    num_lanes,
    out_token_stride,
    out_head_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Joins the splits of one lane of a short row, in the order of its keys, to its result."""
    row, lane = tl.program_id(0) // num_lanes, tl.program_id(0) % num_lanes
    kv_head = tl.program_id(1)
    start = tl.load(query_starts + row)
    lanes = (tl.load(query_starts + row + 1) - start) * GROUP
    if (lanes > SHORT) | (lane >= lanes):
        return
    seq_len = tl.load(seq_lens + row)
    span = seq_len - first_key(seq_len - lanes // GROUP, window, TOKENS, HAS_WINDOW)
    used = tl.cdiv(span, split_size_of(span))
    dim = tl.arange(0, DIM)
    sums = tl.zeros([DIM], tl.float32)
    peak = tl.full([1], NOTHING, tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, used, MERGED):
        split = first + tl.arange(0, MERGED)
        there = split < used
        slot = partial_slot(row, kv_head, split, lane, num_splits, num_lanes, KV_HEADS)
        peaks = tl.load(partial_stats + slot * 2, mask=there, other=NOTHING)
        totals = tl.load(partial_stats + slot * 2 + 1, mask=there, other=0.0)
        inside = there[:, None] & (dim < HEAD_DIM)[None, :]
        part = tl.load(partial_sums + slot[:, None] * HEAD_DIM + dim[None, :], inside, other=0.0)
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        weights = tl.exp2(peaks - new_peak)
        fade = tl.exp2(peak - new_peak)
        sums = sums * fade + tl.sum(part * weights[:, None], 0)
        total = total * fade + tl.sum(totals * weights, 0)
        peak = new_peak
    token = (start + lane // GROUP).to(tl.int64)
    head = kv_head * GROUP + lane % GROUP
    place = token * out_token_stride + head * out_head_stride + dim
    result = sums / tl.where(total > 0.0, total, 1.0)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
