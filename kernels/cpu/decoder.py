"""Decoder layers over the tokens of a step: all of them run in one call of every thread of a team.

It knows addresses, lines and layers. It does not know sequences, nor how a model was loaded. A line is one token.
Products and norms treat each line alone, and attention takes the lines of a part one after another, each over all
tokens before it. So a token has the same bits however its prompt is cut into steps and whatever the other tokens are. A
layer is a few stages, each cut into pieces that the threads share (`team`). A stage begins when the pieces of the one
before are done, not when all threads have arrived, so a late thread does not delay the others.
"""

from __future__ import annotations

from numba import njit

from kernels.cpu import words
from kernels.cpu.attention import attend
from kernels.cpu.feed import EXPERT_STAGES, LINES_AT_ONCE, TILE_BYTES, add_experts, gate, multiply
from kernels.cpu.lanes import add_at, integer_at, load, number_at, store, store_bf16
from kernels.cpu.pointwise import layer_norm, rms_norm, rotate
from kernels.cpu.product import PANEL, PANEL_BYTES, TILED, add_bias, panel_bytes, panel_product, takes_pairs
from kernels.cpu.team import LINE, done, finish, stage_bytes, take
from kernels.cpu.tile_attention import attend_tiles, query_at, query_scale, see
from kernels.cpu.tiles import release

_FEED_STAGE = 7
STAGES = _FEED_STAGE + EXPERT_STAGES
"""Largest number of stages of a layer."""
_NORMED_AT_ONCE = 8


@njit(nogil=True)
def decode(job):
    """Does the work of one thread: all layers, stage by stage."""
    counters = integer_at(job + words.COUNTERS)
    thread = add_at(counters, 1)
    private = integer_at(job + words.PRIVATE) + thread * integer_at(job + words.PRIVATE_BYTES)
    stage, size = counters + LINE, stage_bytes(integer_at(job + words.THREADS))
    heads_width = integer_at(job + words.HEADS) * integer_at(job + words.HEAD_DIM)
    qkv_heads = integer_at(job + words.HEADS) + 2 * integer_at(job + words.KV_HEADS)
    qkv_panels = qkv_heads * integer_at(job + words.HEAD_DIM) // PANEL
    hidden, projected = integer_at(job + words.HIDDEN), integer_at(job + words.PROJECTED)
    attended, fed = integer_at(job + words.ATTENDED), integer_at(job + words.FED)
    for index in range(integer_at(job + words.LAYERS)):
        layer = integer_at(job + words.LAYER_WORDS) + index * words.LAYER_BYTES
        numbers = integer_at(job + words.LAYER_NUMBERS) + index * words.NUMBER_BYTES
        is_parallel = integer_at(layer + words.PARALLEL) != 0
        weight, bias = integer_at(layer + words.NORM_BEFORE), integer_at(layer + words.NORM_BEFORE_BIAS)
        x = _normed(job, weight, bias, number_at(numbers + words.EPS_BEFORE), private, thread, stage)
        weight, bias = integer_at(layer + words.QKV), integer_at(layer + words.QKV_BIAS)
        multiply(job, weight, bias, x, hidden, qkv_panels, projected, 0, 0, thread, stage + size)
        if integer_at(job + words.STORES) != 0:
            _store(job, layer, numbers, private, thread, stage + 2 * size)
        _attend(job, layer, numbers, private, thread, stage + 3 * size)
        output, output_bias = integer_at(layer + words.OUTPUT), integer_at(layer + words.OUTPUT_BIAS)
        norm, eps = integer_at(layer + words.NORM_ATTENDED), number_at(numbers + words.EPS_ATTENDED)
        if not is_parallel:
            _add_product(job, attended, heads_width, output, output_bias, norm, private, thread, stage + 4 * size)
            _add_normed(job, norm, eps, thread, stage + 5 * size)
        weight, bias = integer_at(layer + words.NORM_BEHIND), integer_at(layer + words.NORM_BEHIND_BIAS)
        x = _normed(job, weight, bias, number_at(numbers + words.EPS_BEHIND), private, thread, stage + 6 * size)
        if integer_at(layer + words.ROUTER) != 0:
            add_experts(job, layer, x, private, thread, stage + _FEED_STAGE * size, size)
            stage += STAGES * size
            continue
        gate(job, layer, x, 0, 0, private, thread, stage + _FEED_STAGE * size)
        if is_parallel:  # the states change only after the gate has read them
            _add_product(job, attended, heads_width, output, output_bias, norm, private, thread, stage + 4 * size)
            _add_normed(job, norm, eps, thread, stage + 5 * size)
        weight, bias = integer_at(layer + words.DOWN), integer_at(layer + words.DOWN_BIAS)
        norm, eps = integer_at(layer + words.NORM_FED), number_at(numbers + words.EPS_FED)
        inner = integer_at(layer + words.INNER)
        _add_product(job, fed, inner, weight, bias, norm, private, thread, stage + 8 * size)
        _add_normed(job, norm, eps, thread, stage + 9 * size)
        stage += STAGES * size
    if integer_at(job + words.KIND) == TILED:
        release()


@njit(nogil=True)
def _normed(job, weight, bias, eps, private, thread, stage):
    """Returns the address of the normed lines, which are inputs of a product. If there are few, each thread norms all
    lines for itself, in private memory after its panel outputs: that takes less time than waiting for other threads."""
    lines, threads = integer_at(job + words.LINES), integer_at(job + words.THREADS)
    shared = integer_at(job + words.NORMED)
    if shared == 0:
        own = private + 2 * TILE_BYTES
        _norm_lines(job, weight, bias, eps, own, 0, lines)
        return own
    pieces = (lines + _NORMED_AT_ONCE - 1) // _NORMED_AT_ONCE
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        first = piece * _NORMED_AT_ONCE
        _norm_lines(job, weight, bias, eps, shared, first, min(lines, first + _NORMED_AT_ONCE))
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)
    return shared


@njit(nogil=True)
def _norm_lines(job, weight, bias, eps, out, first, end):
    hidden, narrow = integer_at(job + words.HIDDEN), takes_pairs(integer_at(job + words.KIND))
    x = integer_at(job + words.STATES)
    for line in range(first, end):
        to = out + line * hidden * (2 if narrow else 4)
        if bias != 0:
            layer_norm(to, x + 4 * line * hidden, weight, bias, hidden, eps, narrow)
        else:
            rms_norm(to, x + 4 * line * hidden, weight, hidden, eps, narrow)


@njit(nogil=True)
def _store(job, layer, numbers, private, thread, stage):
    pieces, threads = integer_at(job + words.PARTS), integer_at(job + words.THREADS)
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        part = integer_at(job + words.PART_WORDS) + piece * words.PART_BYTES
        first, place = integer_at(part + words.FIRST), integer_at(part + words.PLACE)
        for line in range(first, integer_at(part + words.END)):
            for kv_head in range(integer_at(job + words.KV_HEADS)):
                to = place + line - first
                _store_head(job, layer, numbers, private, line, to, integer_at(part + words.TABLE), kv_head)
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)


@njit(nogil=True)
def _attend(job, layer, numbers, private, thread, stage):
    parts, threads = integer_at(job + words.PARTS), integer_at(job + words.THREADS)
    pieces, stored = parts * integer_at(job + words.KV_HEADS), integer_at(job + words.STORES) != 0
    tiled = integer_at(job + words.IN_TILES) != 0
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        part, kv_head = integer_at(job + words.PART_WORDS) + piece % parts * words.PART_BYTES, piece // parts
        first, table = integer_at(part + words.FIRST), integer_at(part + words.TABLE)
        end, place = integer_at(part + words.END), integer_at(part + words.PLACE)
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
    heads, kv_heads = integer_at(job + words.HEADS), integer_at(job + words.KV_HEADS)
    head_dim, block_size = integer_at(job + words.HEAD_DIM), integer_at(job + words.BLOCK_SIZE)
    narrow = integer_at(job + words.NARROW) != 0
    width = 4 * head_dim
    projected = integer_at(job + words.PROJECTED) + line * (heads + 2 * kv_heads) * width
    key, value = (projected + (heads + kv_head) * width, projected + (heads + kv_heads + kv_head) * width)
    weight, eps = integer_at(layer + words.NORM_KEY), number_at(numbers + words.EPS_HEADS)
    _turned(job, layer, private, key, weight, eps, line, 1.0)
    token_bytes = head_dim * (2 if narrow else 4)
    half_bytes = kv_heads * block_size * token_bytes
    block = integer_at(table + 8 * (place // block_size)) * 2 * half_bytes
    slot = integer_at(layer + words.KV) + block + (kv_head * block_size + place % block_size) * token_bytes
    _copy(slot, private, head_dim, narrow)
    _copy(slot + half_bytes, value, head_dim, narrow)


@njit(nogil=True)
def _attend_head(job, layer, numbers, private, line, place, table, kv_head):
    """Computes attention of a line's query heads of a KV head, over all tokens up to its own."""
    heads, kv_heads = integer_at(job + words.HEADS), integer_at(job + words.KV_HEADS)
    head_dim, block_size = integer_at(job + words.HEAD_DIM), integer_at(job + words.BLOCK_SIZE)
    narrow, groups = integer_at(job + words.NARROW) != 0, heads // kv_heads
    width = 4 * head_dim
    query = private
    out = query + groups * width
    scratch = out + groups * width
    projected = integer_at(job + words.PROJECTED) + line * (heads + 2 * kv_heads) * width
    weight = integer_at(layer + words.NORM_QUERY)
    eps, scale = number_at(numbers + words.EPS_HEADS), number_at(numbers + words.SCALE)
    for head in range(groups):
        x = projected + (kv_head * groups + head) * width
        _turned(job, layer, query + head * width, x, weight, eps, line, scale)
    head_bytes = block_size * head_dim * (2 if narrow else 4)
    half_bytes = kv_heads * head_bytes
    keys = integer_at(layer + words.KV) + kv_head * head_bytes
    window = integer_at(layer + words.WINDOW)
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
        number_at(numbers + words.SOFTCAP),
        scratch,
    )
    as_pairs = takes_pairs(integer_at(job + words.KIND))
    size = head_dim * (2 if as_pairs else 4)
    to = integer_at(job + words.ATTENDED) + (line * heads + kv_head * groups) * size
    _copy(to, out, groups * head_dim, as_pairs)


@njit(nogil=True)
def _attend_part(job, layer, numbers, private, first, end, place, table, kv_head):
    """Does the same as `_attend_head` for all lines of a part, in the matrix unit."""
    heads, kv_heads = integer_at(job + words.HEADS), integer_at(job + words.KV_HEADS)
    head_dim, block_size = integer_at(job + words.HEAD_DIM), integer_at(job + words.BLOCK_SIZE)
    groups, window = heads // kv_heads, integer_at(layer + words.WINDOW)
    lanes, width = (end - first) * groups, 4 * head_dim
    weight = integer_at(layer + words.NORM_QUERY)
    eps, scale = number_at(numbers + words.EPS_HEADS), query_scale(number_at(numbers + words.SCALE))
    for lane in range(lanes):
        line, head = first + lane // groups, kv_head * groups + lane % groups
        x = integer_at(job + words.PROJECTED) + (line * (heads + 2 * kv_heads) + head) * width
        _turned(job, layer, query_at(private, lane, head_dim), x, weight, eps, line, scale)
        last = place + line - first
        see(private, lanes, lane, head_dim, max(0, last + 1 - window) if window > 0 else 0, last + 1)
    half_bytes = kv_heads * block_size * head_dim * 2
    attend_tiles(
        lanes,
        head_dim,
        integer_at(layer + words.KV) + kv_head * block_size * head_dim * 2,
        2 * half_bytes,
        half_bytes,
        table,
        block_size,
        max(0, place + 1 - window) if window > 0 else 0,
        place + end - first,
        private,
    )
    for line in range(first, end):
        to = integer_at(job + words.ATTENDED) + (line * heads + kv_head * groups) * 2 * head_dim
        _copy(to, query_at(private, (line - first) * groups, head_dim), groups * head_dim, True)


@njit(nogil=True)
def _turned(job, layer, out, x, weight, eps, line, scale):
    head_dim = integer_at(job + words.HEAD_DIM)
    if weight != 0:
        rms_norm(out, x, weight, head_dim, eps, False)
        x = out
    position, turned = integer_at(integer_at(job + words.POSITIONS) + 8 * line), integer_at(layer + words.TURNED)
    rotate(out, x, integer_at(layer + words.TURNS) + 4 * position * turned, turned, head_dim, scale)


@njit(nogil=True)
def _copy(out, x, size, narrow):
    for at in range(0, size, 16):
        if narrow:
            store_bf16(out + 2 * at, load(x + 4 * at))
        else:
            store(out + 4 * at, load(x + 4 * at))


@njit(nogil=True)
def _add_product(job, x, num_inputs, weight, bias, norm, private, thread, stage):
    """Adds a product to the states, or writes it where `_add_normed` reads it if there is a norm."""
    lines, hidden = integer_at(job + words.LINES), integer_at(job + words.HIDDEN)
    kind, threads = integer_at(job + words.KIND), integer_at(job + words.THREADS)
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
            to = (
                integer_at(job + (words.STATES if norm == 0 else words.ADDED))
                + 4 * first * hidden
                + PANEL_BYTES * piece
            )
            for line in range(some):
                for at in range(0, PANEL_BYTES, 64):
                    found = load(private + PANEL_BYTES * line + at)
                    store(to + at, load(to + at) + found if norm == 0 else found)
                to += 4 * hidden
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)


@njit(nogil=True)
def _add_normed(job, norm, eps, thread, stage):
    """Norms what `_add_product` wrote and adds it to the states, line by line. Does nothing without a norm."""
    lines, hidden, threads = (
        integer_at(job + words.LINES),
        integer_at(job + words.HIDDEN),
        integer_at(job + words.THREADS),
    )
    pieces = lines if norm != 0 else 0
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        added, to = (
            integer_at(job + words.ADDED) + 4 * piece * hidden,
            integer_at(job + words.STATES) + 4 * piece * hidden,
        )
        rms_norm(added, added, norm, hidden, eps, False)
        for at in range(0, 4 * hidden, 64):
            store(to + at, load(to + at) + load(added + at))
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)
