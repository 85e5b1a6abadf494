"""Layers of the Llama family over the tokens of a step: all of them run in one call of every thread of a team.

Knows addresses, lines and layers. Does not know sequences, nor how a model was loaded. A line is one token. Products
and norms treat each line alone, and attention takes the lines of a part one after another, each over all tokens before
it. So a token has the same bits however its prompt is cut into steps and whatever the other tokens are. A layer is a
few stages, each cut into pieces that the threads share (`team`). A stage begins when the pieces of the one before are
done, not when all threads have arrived, so a late thread does not delay the others.
"""

from __future__ import annotations

from numba import njit

from kernels.cpu.attention import attend
from kernels.cpu.lanes import add_at, integer_at, load, number_at, store, store_bf16
from kernels.cpu.pointwise import rms_norm, rotate, silu_mul
from kernels.cpu.product import PANEL, PANEL_BYTES, TILED, add_bias, panel_bytes, panel_product, takes_pairs
from kernels.cpu.team import LINE, done, finish, stage_bytes, take
from kernels.cpu.tile_attention import attend_tiles, query_at, query_scale, see
from kernels.cpu.tiles import release

JOB = (
    "lines",
    "parts",
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
    "part_words",  # [parts, len(PART)]
    "stores",  # keys and values are stored before attention begins, else by the piece that attends to them
    "normed",  # [lines, hidden], inputs of a product; 0 if each thread norms all lines for itself
    "threads",
    "counters",  # one counter of threads, then those of each stage (`team`), zeros at first
    "private",  # `private_bytes` bytes for each thread
    "private_bytes",
    "in_tiles",  # attention takes the matrix unit
)
"""Words of a call, int64: sizes, and addresses of data."""
PART = (
    "first",
    "end",
    "place",  # position of the first line's key in the row's KV
    "table",  # address of the row's int64 block ids
)
"""Words of a part, which is a run of consecutive lines of one row; a piece of attention is one part and one KV head."""
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
"""Words of a layer: addresses, 0 if it has no such tensor."""
NUMBERS = ("eps_before", "eps_behind", "eps_heads", "scale")

(
    _LINES,
    _PARTS,
    _LAYERS,
    _HIDDEN,
    _HEADS,
    _KV_HEADS,
    _HEAD_DIM,
    _INNER,
    _BLOCK_SIZE,
    _KIND,
    _NARROW,
    _LAYER_WORDS,
    _LAYER_NUMBERS,
    _STATES,
    _PROJECTED,
    _ATTENDED,
    _GATED,
    _TURNS,
    _POSITIONS,
    _PART_WORDS,
    _STORES,
    _NORMED,
    _THREADS,
    _COUNTERS,
    _PRIVATE,
    _PRIVATE_BYTES,
    _IN_TILES,
) = range(0, 8 * len(JOB), 8)
_FIRST, _END, _PLACE, _TABLE = range(0, 8 * len(PART), 8)
(
    _QKV,
    _QKV_BIAS,
    _OUTPUT,
    _OUTPUT_BIAS,
    _GATE_UP,
    _GATE_UP_BIAS,
    _DOWN,
    _DOWN_BIAS,
    _NORM_BEFORE,
    _NORM_BEHIND,
    _NORM_QUERY,
    _NORM_KEY,
    _KV,
    _WINDOW,
) = range(0, 8 * len(LAYER), 8)
_EPS_BEFORE, _EPS_BEHIND, _EPS_HEADS, _SCALE = range(0, 4 * len(NUMBERS), 4)
_PART_BYTES, _LAYER_BYTES, _NUMBER_BYTES = 8 * len(PART), 8 * len(LAYER), 4 * len(NUMBERS)

STAGES = 8
"""Largest number of stages of a layer."""
LINES_AT_ONCE = 64
"""Number of lines for which a thread computes a panel's outputs in private memory before it uses them."""
_NORMED_AT_ONCE = 8
TILE_BYTES = LINES_AT_ONCE * PANEL_BYTES


@njit(nogil=True)
def decode(job):
    """The work of one thread: all layers, stage by stage."""
    counters = integer_at(job + _COUNTERS)
    thread = add_at(counters, 1)
    private = integer_at(job + _PRIVATE) + thread * integer_at(job + _PRIVATE_BYTES)
    stage, size = counters + LINE, stage_bytes(integer_at(job + _THREADS))
    heads_width = integer_at(job + _HEADS) * integer_at(job + _HEAD_DIM)
    attended, gated = integer_at(job + _ATTENDED), integer_at(job + _GATED)
    inner = integer_at(job + _INNER)
    for index in range(integer_at(job + _LAYERS)):
        layer = integer_at(job + _LAYER_WORDS) + index * _LAYER_BYTES
        numbers = integer_at(job + _LAYER_NUMBERS) + index * _NUMBER_BYTES
        weight, eps = integer_at(layer + _NORM_BEFORE), number_at(numbers + _EPS_BEFORE)
        x = _normed(job, weight, eps, private, thread, stage)
        _project(job, layer, x, thread, stage + size)
        if integer_at(job + _STORES) != 0:
            _store(job, layer, numbers, private, thread, stage + 2 * size)
        _attend(job, layer, numbers, private, thread, stage + 3 * size)
        weight, bias = integer_at(layer + _OUTPUT), integer_at(layer + _OUTPUT_BIAS)
        _add_product(job, attended, heads_width, weight, bias, private, thread, stage + 4 * size)
        weight, eps = integer_at(layer + _NORM_BEHIND), number_at(numbers + _EPS_BEHIND)
        x = _normed(job, weight, eps, private, thread, stage + 5 * size)
        _gate(job, layer, x, private, thread, stage + 6 * size)
        weight, bias = integer_at(layer + _DOWN), integer_at(layer + _DOWN_BIAS)
        _add_product(job, gated, inner, weight, bias, private, thread, stage + 7 * size)
        stage += STAGES * size
    if integer_at(job + _KIND) == TILED:
        release()


@njit(nogil=True)
def _normed(job, weight, eps, private, thread, stage):
    """Returns the address of the normed lines, which are inputs of a product. If there are few, each thread norms all
    lines for itself, in private memory after its panel outputs: that takes less time than waiting for other threads."""
    lines, threads = integer_at(job + _LINES), integer_at(job + _THREADS)
    shared = integer_at(job + _NORMED)
    if shared == 0:
        own = private + 2 * TILE_BYTES
        _norm_lines(job, weight, eps, own, 0, lines)
        return own
    pieces = (lines + _NORMED_AT_ONCE - 1) // _NORMED_AT_ONCE
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        first = piece * _NORMED_AT_ONCE
        _norm_lines(job, weight, eps, shared, first, min(lines, first + _NORMED_AT_ONCE))
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)
    return shared


@njit(nogil=True)
def _norm_lines(job, weight, eps, out, first, end):
    hidden, narrow = integer_at(job + _HIDDEN), takes_pairs(integer_at(job + _KIND))
    x = integer_at(job + _STATES)
    for line in range(first, end):
        to = out + line * hidden * (2 if narrow else 4)
        rms_norm(to, x + 4 * line * hidden, weight, hidden, eps, narrow)


@njit(nogil=True)
def _project(job, layer, x, thread, stage):
    lines, hidden = integer_at(job + _LINES), integer_at(job + _HIDDEN)
    kind, threads = integer_at(job + _KIND), integer_at(job + _THREADS)
    heads = integer_at(job + _HEADS) + 2 * integer_at(job + _KV_HEADS)
    width = heads * integer_at(job + _HEAD_DIM)
    pieces, bias = width // PANEL, integer_at(layer + _QKV_BIAS)
    x_stride = hidden * (2 if takes_pairs(kind) else 4)
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        panel = integer_at(layer + _QKV) + piece * panel_bytes(kind, hidden)
        out = integer_at(job + _PROJECTED) + PANEL_BYTES * piece
        panel_product(kind, panel, x, x_stride, hidden, out, 4 * width, lines)
        if bias != 0:
            add_bias(out, 4 * width, lines, bias + PANEL_BYTES * piece)
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)


@njit(nogil=True)
def _store(job, layer, numbers, private, thread, stage):
    pieces, threads = integer_at(job + _PARTS), integer_at(job + _THREADS)
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        part = integer_at(job + _PART_WORDS) + piece * _PART_BYTES
        first, place = integer_at(part + _FIRST), integer_at(part + _PLACE)
        for line in range(first, integer_at(part + _END)):
            for kv_head in range(integer_at(job + _KV_HEADS)):
                to = place + line - first
                _store_head(job, layer, numbers, private, line, to, integer_at(part + _TABLE), kv_head)
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)


@njit(nogil=True)
def _attend(job, layer, numbers, private, thread, stage):
    parts, threads = integer_at(job + _PARTS), integer_at(job + _THREADS)
    pieces, stored = parts * integer_at(job + _KV_HEADS), integer_at(job + _STORES) != 0
    tiled = integer_at(job + _IN_TILES) != 0
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        part, kv_head = integer_at(job + _PART_WORDS) + piece % parts * _PART_BYTES, piece // parts
        first, table = integer_at(part + _FIRST), integer_at(part + _TABLE)
        end, place = integer_at(part + _END), integer_at(part + _PLACE)
        for line in range(first, end if not stored else first):
            _store_head(job, layer, numbers, private, line, place + line - first, table, kv_head)
        if tiled:
            _attend_part(job, layer, numbers, private, first, end, place, table, kv_head)
        else:
            for line in range(first, end):
                _attend_head(job, layer, numbers, private, line, place + line - first, table, kv_head)
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)


@njit(nogil=True)
def _store_head(job, layer, numbers, private, line, place, table, kv_head):
    """Stores the rotated key and the value of a line."""
    heads, kv_heads = integer_at(job + _HEADS), integer_at(job + _KV_HEADS)
    head_dim, block_size = integer_at(job + _HEAD_DIM), integer_at(job + _BLOCK_SIZE)
    narrow = integer_at(job + _NARROW) != 0
    width = 4 * head_dim
    projected = integer_at(job + _PROJECTED) + line * (heads + 2 * kv_heads) * width
    key, value = (projected + (heads + kv_head) * width, projected + (heads + kv_heads + kv_head) * width)
    weight, eps = integer_at(layer + _NORM_KEY), number_at(numbers + _EPS_HEADS)
    _turned(job, private, key, weight, eps, line, 1.0)
    token_bytes = head_dim * (2 if narrow else 4)
    half_bytes = kv_heads * block_size * token_bytes
    block = integer_at(table + 8 * (place // block_size)) * 2 * half_bytes
    slot = integer_at(layer + _KV) + block + (kv_head * block_size + place % block_size) * token_bytes
    _copy(slot, private, head_dim, narrow)
    _copy(slot + half_bytes, value, head_dim, narrow)


@njit(nogil=True)
def _attend_head(job, layer, numbers, private, line, place, table, kv_head):
    """Computes attention of a line's query heads of a KV head, over all tokens up to its own."""
    heads, kv_heads = integer_at(job + _HEADS), integer_at(job + _KV_HEADS)
    head_dim, block_size = integer_at(job + _HEAD_DIM), integer_at(job + _BLOCK_SIZE)
    narrow, groups = integer_at(job + _NARROW) != 0, heads // kv_heads
    width = 4 * head_dim
    query = private
    out = query + groups * width
    scratch = out + groups * width
    projected = integer_at(job + _PROJECTED) + line * (heads + 2 * kv_heads) * width
    weight = integer_at(layer + _NORM_QUERY)
    eps, scale = number_at(numbers + _EPS_HEADS), number_at(numbers + _SCALE)
    for head in range(groups):
        x = projected + (kv_head * groups + head) * width
        _turned(job, query + head * width, x, weight, eps, line, scale)
    head_bytes = block_size * head_dim * (2 if narrow else 4)
    half_bytes = kv_heads * head_bytes
    keys = integer_at(layer + _KV) + kv_head * head_bytes
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
    as_pairs = takes_pairs(integer_at(job + _KIND))
    size = head_dim * (2 if as_pairs else 4)
    to = integer_at(job + _ATTENDED) + (line * heads + kv_head * groups) * size
    _copy(to, out, groups * head_dim, as_pairs)


@njit(nogil=True)
def _attend_part(job, layer, numbers, private, first, end, place, table, kv_head):
    """Does the same as `_attend_head` for all lines of a part, in the matrix unit."""
    heads, kv_heads = integer_at(job + _HEADS), integer_at(job + _KV_HEADS)
    head_dim, block_size = integer_at(job + _HEAD_DIM), integer_at(job + _BLOCK_SIZE)
    groups, window = heads // kv_heads, integer_at(layer + _WINDOW)
    lanes, width = (end - first) * groups, 4 * head_dim
    weight = integer_at(layer + _NORM_QUERY)
    eps, scale = number_at(numbers + _EPS_HEADS), query_scale(number_at(numbers + _SCALE))
    for lane in range(lanes):
        line, head = first + lane // groups, kv_head * groups + lane % groups
        x = integer_at(job + _PROJECTED) + (line * (heads + 2 * kv_heads) + head) * width
        _turned(job, query_at(private, lane, head_dim), x, weight, eps, line, scale)
        last = place + line - first
        see(private, lanes, lane, head_dim, max(0, last + 1 - window) if window > 0 else 0, last + 1)
    half_bytes = kv_heads * block_size * head_dim * 2
    attend_tiles(
        lanes,
        head_dim,
        integer_at(layer + _KV) + kv_head * block_size * head_dim * 2,
        2 * half_bytes,
        half_bytes,
        table,
        block_size,
        max(0, place + 1 - window) if window > 0 else 0,
        place + end - first,
        private,
    )
    for line in range(first, end):
        to = integer_at(job + _ATTENDED) + (line * heads + kv_head * groups) * 2 * head_dim
        _copy(to, query_at(private, (line - first) * groups, head_dim), groups * head_dim, True)


@njit(nogil=True)
def _turned(job, out, x, weight, eps, line, scale):
    head_dim = integer_at(job + _HEAD_DIM)
    if weight != 0:
        rms_norm(out, x, weight, head_dim, eps, False)
        x = out
    position = integer_at(integer_at(job + _POSITIONS) + 8 * line)
    rotate(out, x, integer_at(job + _TURNS) + 4 * position * head_dim, head_dim, scale)


@njit(nogil=True)
def _copy(out, x, size, narrow):
    for at in range(0, size, 16):
        if narrow:
            store_bf16(out + 2 * at, load(x + 4 * at))
        else:
            store(out + 4 * at, load(x + 4 * at))


@njit(nogil=True)
def _add_product(job, x, num_inputs, weight, bias, private, thread, stage):
    """Adds a product to the states."""
    lines, hidden = integer_at(job + _LINES), integer_at(job + _HIDDEN)
    kind, threads = integer_at(job + _KIND), integer_at(job + _THREADS)
    pieces = hidden // PANEL
    x_stride = num_inputs * (2 if takes_pairs(kind) else 4)
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        panel = weight + piece * panel_bytes(kind, num_inputs)
        for first in range(0, lines, LINES_AT_ONCE):
            some, rows = min(lines - first, LINES_AT_ONCE), x + first * x_stride
            panel_product(kind, panel, rows, x_stride, num_inputs, private, PANEL_BYTES, some)
            if bias != 0:
                add_bias(private, PANEL_BYTES, some, bias + PANEL_BYTES * piece)
            to = integer_at(job + _STATES) + 4 * first * hidden + PANEL_BYTES * piece
            for line in range(some):
                for at in range(0, PANEL_BYTES, 64):
                    store(to + at, load(to + at) + load(private + PANEL_BYTES * line + at))
                to += 4 * hidden
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)


@njit(nogil=True)
def _gate(job, layer, x, private, thread, stage):
    lines, hidden = integer_at(job + _LINES), integer_at(job + _HIDDEN)
    kind, threads = integer_at(job + _KIND), integer_at(job + _THREADS)
    inner, bias = integer_at(job + _INNER), integer_at(layer + _GATE_UP_BIAS)
    pieces, size, as_pairs = inner // PANEL, panel_bytes(kind, hidden), takes_pairs(kind)
    x_stride = hidden * (2 if as_pairs else 4)
    gate, up = private, private + TILE_BYTES
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        panel = integer_at(layer + _GATE_UP) + piece * size
        other = panel + pieces * size
        for first in range(0, lines, LINES_AT_ONCE):
            some, rows = min(lines - first, LINES_AT_ONCE), x + first * x_stride
            panel_product(kind, panel, rows, x_stride, hidden, gate, PANEL_BYTES, some)
            panel_product(kind, other, rows, x_stride, hidden, up, PANEL_BYTES, some)
            if bias != 0:
                add_bias(gate, PANEL_BYTES, some, bias + PANEL_BYTES * piece)
                add_bias(up, PANEL_BYTES, some, bias + PANEL_BYTES * (pieces + piece))
            to = integer_at(job + _GATED) + (first * inner + PANEL * piece) * (2 if as_pairs else 4)
            _silu_mul_lines(gate, up, to, inner, some, as_pairs)
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)


@njit(nogil=True)
def _silu_mul_lines(gate, up, out, inner, lines, as_pairs):
    """Writes silu(gate) * up for the lines of a panel."""
    for line in range(lines):
        row = PANEL_BYTES * line
        for at in range(0, PANEL_BYTES, 64):
            product = silu_mul(load(gate + row + at), load(up + row + at))
            if as_pairs:
                store_bf16(out + line * inner * 2 + at // 2, product)
            else:
                store(out + line * inner * 4 + at, product)
