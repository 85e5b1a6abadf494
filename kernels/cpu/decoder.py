"""Layers of the Llama family for rows of few tokens: all of them in one call of every thread of a team.

Knows addresses, rows and layers. Does not know sequences, nor how a model was loaded. A line is one token: products and
norms know lines only, attention goes through those of a row one after another, so a row of several tokens has the bits
of as many rows of one. A layer is five stages, each cut into pieces that whichever thread is free takes; a stage begins
when the pieces of the one before are done, not when all threads are there, so one that comes late holds nobody up.
"""

from __future__ import annotations

from numba import njit

from kernels.cpu.attention import attend
from kernels.cpu.lanes import (
    add_at,
    integer_at,
    load,
    number_at,
    store,
    store_bf16,
)
from kernels.cpu.pointwise import rms_norm, rotate, silu_mul
from kernels.cpu.product import FLOATS, PAIRED, add_bias, panel_product
from kernels.cpu.team import finish

JOB = (
    "lines",
    "rows",
    "layers",
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "inner",  # outputs of the gate
    "block_size",
    "kind",  # of the products (`product`)
    "narrow",  # KV is bfloat16, else float32
    "layer_words",  # [layers, len(LAYER)]
    "layer_numbers",  # [layers, len(NUMBERS)] float32
    "states",  # [lines, hidden] float32, changed in place
    "projected",  # [lines, (heads + 2 kv_heads) * head_dim] float32
    "attended",  # [lines, heads * head_dim], inputs of a product
    "gated",  # [lines, inner], inputs of a product
    "turns",  # [positions, head_dim] float32 (`pointwise.rotate`)
    "positions",  # [lines]: of the tokens
    "starts",  # [rows + 1]: first line of each row
    "places",  # [rows]: where the key of the first line goes, counted in the row's KV
    "tables",  # [rows]: addresses of int64 block ids
    "counters",  # [1 + 10 * layers, 8], zeros: threads; then pieces of each stage that were taken, and that are done
    "private",  # of each thread: `private_bytes`
    "normed_bytes",
    "tile_bytes",
    "private_bytes",
)
"""Words of a call, int64: sizes, and addresses of what lies elsewhere."""
LAYER = (
    "qkv",
    "qkv_bias",
    "output",
    "output_bias",
    "gate_up",
    "gate_up_bias",
    "down",
    "down_bias",
    "norm_before",
    "norm_behind",
    "norm_query",
    "norm_key",
    "kv",
    "window",
)
"""Words of a layer: addresses, 0 where it has none."""
NUMBERS = ("eps_before", "eps_behind", "eps_heads", "scale")

(
    _LINES, _ROWS, _LAYERS, _HIDDEN, _HEADS, _KV_HEADS, _HEAD_DIM, _INNER, _BLOCK_SIZE, _KIND, _NARROW, _LAYER_WORDS,
    _LAYER_NUMBERS, _STATES, _PROJECTED, _ATTENDED, _GATED, _TURNS, _POSITIONS, _STARTS, _PLACES, _TABLES, _COUNTERS,
    _PRIVATE, _NORMED_BYTES, _TILE_BYTES, _PRIVATE_BYTES,
) = range(0, 8 * len(JOB), 8)  # fmt: skip
(
    _QKV, _QKV_BIAS, _OUTPUT, _OUTPUT_BIAS, _GATE_UP, _GATE_UP_BIAS, _DOWN, _DOWN_BIAS, _NORM_BEFORE, _NORM_BEHIND,
    _NORM_QUERY, _NORM_KEY, _KV, _WINDOW,
) = range(0, 8 * len(LAYER), 8)  # fmt: skip
_EPS_BEFORE, _EPS_BEHIND, _EPS_HEADS, _SCALE = range(0, 4 * len(NUMBERS), 4)
_LAYER_BYTES, _NUMBER_BYTES = 8 * len(LAYER), 4 * len(NUMBERS)
_STAGE_BYTES = 128
"""Two counters, each on a line of its own."""


@njit(nogil=True)
def decode(job):
    """What a thread does."""
    counters = integer_at(job + _COUNTERS)
    thread = add_at(counters, 1)
    private = integer_at(job + _PRIVATE) + thread * integer_at(job + _PRIVATE_BYTES)
    stage = counters + 64
    for index in range(integer_at(job + _LAYERS)):
        layer = integer_at(job + _LAYER_WORDS) + index * _LAYER_BYTES
        numbers = integer_at(job + _LAYER_NUMBERS) + index * _NUMBER_BYTES
        _project(job, layer, number_at(numbers + _EPS_BEFORE), private, stage)
        _attend(job, layer, numbers, private, stage + _STAGE_BYTES)
        heads_width = integer_at(job + _HEADS) * integer_at(job + _HEAD_DIM)
        x, weight, bias = (
            integer_at(job + _ATTENDED),
            integer_at(layer + _OUTPUT),
            integer_at(layer + _OUTPUT_BIAS),
        )
        _add_product(job, x, heads_width, weight, bias, private, stage + 2 * _STAGE_BYTES)
        _gate(job, layer, number_at(numbers + _EPS_BEHIND), private, stage + 3 * _STAGE_BYTES)
        x, weight, bias = (
            integer_at(job + _GATED),
            integer_at(layer + _DOWN),
            integer_at(layer + _DOWN_BIAS),
        )
        _add_product(
            job, x, integer_at(job + _INNER), weight, bias, private, stage + 4 * _STAGE_BYTES
        )
        stage += 5 * _STAGE_BYTES


@njit(nogil=True)
def _normed(job, weight, eps, private):
    """Lines as inputs of a product; each thread makes its own."""
    hidden, narrow = integer_at(job + _HIDDEN), integer_at(job + _KIND) == PAIRED
    x = integer_at(job + _STATES)
    for _ in range(integer_at(job + _LINES)):
        rms_norm(private, x, weight, hidden, eps, narrow)
        x += 4 * hidden
        private += (2 if narrow else 4) * hidden


@njit(nogil=True)
def _panel_bytes(kind, num_inputs):
    return num_inputs * (256 if kind == FLOATS else 128)


@njit(nogil=True)
def _project(job, layer, eps, private, stage):
    lines, hidden, kind = (
        integer_at(job + _LINES),
        integer_at(job + _HIDDEN),
        integer_at(job + _KIND),
    )
    heads = integer_at(job + _HEADS) + 2 * integer_at(job + _KV_HEADS)
    width = heads * integer_at(job + _HEAD_DIM)
    pieces, bias = width // 64, integer_at(layer + _QKV_BIAS)
    x_stride = hidden * (2 if kind == PAIRED else 4)
    ready = False
    piece = add_at(stage, 1)
    while piece < pieces:
        if not ready:
            _normed(job, integer_at(layer + _NORM_BEFORE), eps, private)
            ready = True
        panel = integer_at(layer + _QKV) + piece * _panel_bytes(kind, hidden)
        out = integer_at(job + _PROJECTED) + 256 * piece
        panel_product(kind, panel, private, x_stride, hidden, out, 4 * width, lines)
        if bias != 0:
            add_bias(out, 4 * width, lines, bias + 256 * piece)
        add_at(stage + 64, 1)
        piece = add_at(stage, 1)
    finish(stage + 64, pieces)


@njit(nogil=True)
def _attend(job, layer, numbers, private, stage):
    rows, kv_heads = integer_at(job + _ROWS), integer_at(job + _KV_HEADS)
    piece = add_at(stage, 1)
    while piece < rows * kv_heads:
        row, kv_head = piece % rows, piece // rows
        starts = integer_at(job + _STARTS) + 8 * row
        first, place = integer_at(starts), integer_at(integer_at(job + _PLACES) + 8 * row)
        table = integer_at(integer_at(job + _TABLES) + 8 * row)
        for line in range(first, integer_at(starts + 8)):
            _attend_head(job, layer, numbers, private, line, place + line - first, table, kv_head)
        add_at(stage + 64, 1)
        piece = add_at(stage, 1)
    finish(stage + 64, rows * kv_heads)


@njit(nogil=True)
def _attend_head(job, layer, numbers, private, line, place, table, kv_head):
    """A line's query heads of a KV head: its key and value are stored, then all up to them are attended over."""
    heads, kv_heads = integer_at(job + _HEADS), integer_at(job + _KV_HEADS)
    head_dim, block_size = integer_at(job + _HEAD_DIM), integer_at(job + _BLOCK_SIZE)
    narrow, groups = integer_at(job + _NARROW) != 0, heads // kv_heads
    width = 4 * head_dim
    query = private
    key = query + groups * width
    out = key + width
    scratch = out + groups * width
    eps, scale = number_at(numbers + _EPS_HEADS), number_at(numbers + _SCALE)
    turns = integer_at(job + _TURNS) + integer_at(integer_at(job + _POSITIONS) + 8 * line) * width
    projected = integer_at(job + _PROJECTED) + line * (heads + 2 * kv_heads) * width
    for head in range(groups):
        to = query + head * width
        _turned(
            to,
            projected + (kv_head * groups + head) * width,
            integer_at(layer + _NORM_QUERY),
            eps,
            turns,
            head_dim,
            scale,
        )
    _turned(
        key,
        projected + (heads + kv_head) * width,
        integer_at(layer + _NORM_KEY),
        eps,
        turns,
        head_dim,
        1.0,
    )

    token_bytes = head_dim * (2 if narrow else 4)
    head_bytes = block_size * token_bytes
    half_bytes = kv_heads * head_bytes
    keys = integer_at(layer + _KV) + kv_head * head_bytes
    slot = (
        keys
        + integer_at(table + 8 * (place // block_size)) * (2 * half_bytes)
        + place % block_size * token_bytes
    )
    value = projected + (heads + kv_heads + kv_head) * width
    _copy(slot, key, head_dim, narrow)
    _copy(slot + half_bytes, value, head_dim, narrow)

    window = integer_at(layer + _WINDOW)
    first = max(0, place + 1 - window) if window > 0 else 0
    attend(
        narrow,
        out,
        query,
        groups,
        head_dim,
        keys,
        2 * half_bytes,
        half_bytes,
        table,
        block_size,
        first,
        place + 1,
        scratch,
    )
    as_pairs = integer_at(job + _KIND) == PAIRED
    size = head_dim * (2 if as_pairs else 4)
    to = integer_at(job + _ATTENDED) + (line * heads + kv_head * groups) * size
    _copy(to, out, groups * head_dim, as_pairs)


@njit(nogil=True)
def _turned(out, x, weight, eps, turns, head_dim, scale):
    if weight != 0:
        rms_norm(out, x, weight, head_dim, eps, False)
        x = out
    rotate(out, x, turns, head_dim, scale)


@njit(nogil=True)
def _copy(out, x, size, narrow):
    for at in range(0, size, 16):
        if narrow:
            store_bf16(out + 2 * at, load(x + 4 * at))
        else:
            store(out + 4 * at, load(x + 4 * at))


@njit(nogil=True)
def _add_product(job, x, num_inputs, weight, bias, private, stage):
    """To the states."""
    lines, hidden, kind = (
        integer_at(job + _LINES),
        integer_at(job + _HIDDEN),
        integer_at(job + _KIND),
    )
    x_stride = num_inputs * (2 if kind == PAIRED else 4)
    tile = private + integer_at(job + _NORMED_BYTES)
    piece = add_at(stage, 1)
    while piece < hidden // 64:
        panel = weight + piece * _panel_bytes(kind, num_inputs)
        panel_product(kind, panel, x, x_stride, num_inputs, tile, 256, lines)
        if bias != 0:
            add_bias(tile, 256, lines, bias + 256 * piece)
        for line in range(lines):
            to = integer_at(job + _STATES) + 4 * line * hidden + 256 * piece
            for at in range(0, 256, 64):
                store(to + at, load(to + at) + load(tile + 256 * line + at))
        add_at(stage + 64, 1)
        piece = add_at(stage, 1)
    finish(stage + 64, hidden // 64)


@njit(nogil=True)
def _gate(job, layer, eps, private, stage):
    lines, hidden, kind = (
        integer_at(job + _LINES),
        integer_at(job + _HIDDEN),
        integer_at(job + _KIND),
    )
    inner, bias = integer_at(job + _INNER), integer_at(layer + _GATE_UP_BIAS)
    pieces, panel_bytes, as_pairs = inner // 64, _panel_bytes(kind, hidden), kind == PAIRED
    x_stride = hidden * (2 if as_pairs else 4)
    gate = private + integer_at(job + _NORMED_BYTES)
    up = gate + integer_at(job + _TILE_BYTES)
    ready = False
    piece = add_at(stage, 1)
    while piece < pieces:
        if not ready:
            _normed(job, integer_at(layer + _NORM_BEHIND), eps, private)
            ready = True
        panel = integer_at(layer + _GATE_UP) + piece * panel_bytes
        panel_product(kind, panel, private, x_stride, hidden, gate, 256, lines)
        panel_product(kind, panel + pieces * panel_bytes, private, x_stride, hidden, up, 256, lines)
        if bias != 0:
            add_bias(gate, 256, lines, bias + 256 * piece)
            add_bias(up, 256, lines, bias + 256 * (pieces + piece))
        for line in range(lines):
            to = integer_at(job + _GATED) + (line * inner + 64 * piece) * (2 if as_pairs else 4)
            for at in range(0, 256, 64):
                product = silu_mul(load(gate + 256 * line + at), load(up + 256 * line + at))
                if as_pairs:
                    store_bf16(to + at // 2, product)
                else:
                    store(to + at, product)
        add_at(stage + 64, 1)
        piece = add_at(stage, 1)
    finish(stage + 64, pieces)
