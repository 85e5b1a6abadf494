"""The part of a layer behind attention: products with a gate, by one weight for all lines or by each line's experts.

It knows lines and weights. It does not know attention, nor what is added to the states behind it. A pair is a line and
one of its experts. Pairs are put in the order of their experts, so that an expert's weight is read once for all lines
that take it. A line's outputs are added up in the order of its choice, so it has the same bits whatever other lines
take.
"""

from __future__ import annotations

from numba import njit

from kernels.cpu import words
from kernels.cpu.lanes import (
    first_of,
    fma,
    integer_at,
    load,
    number_at,
    put_integer,
    put_number,
    spread,
    store,
    store_bf16,
)
from kernels.cpu.pointwise import activated, exp_lanes
from kernels.cpu.product import PANEL, PANEL_BYTES, add_bias, panel_bytes, panel_product, takes_pairs
from kernels.cpu.team import done, finish, take

LINES_AT_ONCE = 64
"""Number of lines for which a thread computes a panel's outputs in private memory before it uses them."""
TILE_BYTES = LINES_AT_ONCE * PANEL_BYTES
EXPERT_STAGES = 7
_AT_ONCE = 8
"""Lines of a piece of the stages that multiply nothing."""
_NONE = -1.0
"""Less than any share, for experts that were chosen already."""


@njit(nogil=True)
def multiply(job, weight, bias, x, inputs, panels, out, used, firsts, thread, stage):
    """Writes the products of all lines with a weight. With `used` (else 0) there is a weight for each expert, and `x` has
    lines in the order of experts."""
    kind, threads = integer_at(job + words.KIND), integer_at(job + words.THREADS)
    size, x_stride, stride = panel_bytes(kind, inputs), inputs * (2 if takes_pairs(kind) else 4), PANEL_BYTES * panels
    pieces = panels * (integer_at(used) if used != 0 else 1)
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        expert, first, end = _lines_of(job, used, firsts, piece // panels)
        place = piece % panels
        panel, to = weight + (expert * panels + place) * size, out + first * stride + PANEL_BYTES * place
        panel_product(kind, panel, x + first * x_stride, x_stride, inputs, to, stride, end - first)
        if bias != 0:
            add_bias(to, stride, end - first, bias + PANEL_BYTES * place)
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)


@njit(nogil=True)
def _lines_of(job, used, firsts, number):
    """Returns an expert and its lines: the first, and the one behind the last. Without experts these are all lines."""
    if used == 0:
        return 0, 0, integer_at(job + words.LINES)
    expert = integer_at(used + 8 * (1 + number))
    return expert, integer_at(firsts + 8 * expert), integer_at(firsts + 8 * (expert + 1))


@njit(nogil=True)
def gate(job, layer, x, used, firsts, private, thread, stage):
    """Writes what the gate gives; `x`, `used` and `firsts` as for `multiply`."""
    kind, threads = integer_at(job + words.KIND), integer_at(job + words.THREADS)
    panels = integer_at(layer + words.INNER) // PANEL
    size = panels * (2 if integer_at(layer + words.GATED) != 0 else 1)
    size *= panel_bytes(kind, integer_at(job + words.HIDDEN))
    pieces = panels * (integer_at(used) if used != 0 else 1)
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        expert, first, end = _lines_of(job, used, firsts, piece // panels)
        weight = integer_at(layer + words.GATE_UP) + expert * size
        _gate_panel(job, layer, x, weight, piece % panels, first, end, private)
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)


@njit(nogil=True)
def _gate_panel(job, layer, x, weight, piece, start, end, private):
    """Writes a panel's part of what the gate gives for the lines from `start` to `end` of `x`."""
    kind, hidden, inner = integer_at(job + words.KIND), integer_at(job + words.HIDDEN), integer_at(layer + words.INNER)
    as_pairs, size, bias = takes_pairs(kind), panel_bytes(kind, hidden), integer_at(layer + words.GATE_UP_BIAS)
    x_stride, item = hidden * (2 if as_pairs else 4), 2 if as_pairs else 4
    gates, ups, is_gated = private, private + TILE_BYTES, integer_at(layer + words.GATED) != 0
    panel, behind = weight + piece * size, inner // PANEL
    for first in range(start, end, LINES_AT_ONCE):
        some, rows = min(end - first, LINES_AT_ONCE), x + first * x_stride
        panel_product(kind, panel, rows, x_stride, hidden, gates, PANEL_BYTES, some)
        if bias != 0:
            add_bias(gates, PANEL_BYTES, some, bias + PANEL_BYTES * piece)
        if is_gated:
            panel_product(kind, panel + behind * size, rows, x_stride, hidden, ups, PANEL_BYTES, some)
            if bias != 0:
                add_bias(ups, PANEL_BYTES, some, bias + PANEL_BYTES * (behind + piece))
        to = integer_at(job + words.FED) + (first * inner + PANEL * piece) * item
        _gate_lines(integer_at(layer + words.GATE), gates, ups if is_gated else 0, to, inner, some, as_pairs)


@njit(nogil=True)
def _gate_lines(function, gates, ups, out, inner, lines, as_pairs):
    """Writes function(gate) * up for the lines of a panel; without `ups` (0), function(gate)."""
    for line in range(lines):
        row = PANEL_BYTES * line
        for at in range(0, PANEL_BYTES, 64):
            product = activated(function, load(gates + row + at))
            if ups != 0:
                product = product * load(ups + row + at)
            if as_pairs:
                store_bf16(out + line * inner * 2 + at // 2, product)
            else:
                store(out + line * inner * 4 + at, product)


@njit(nogil=True)
def add_experts(job, layer, x, private, thread, stage, size):
    """Adds the outputs of each line's experts to its states. `x` has the normed lines."""
    hidden, inner = integer_at(job + words.HIDDEN), integer_at(layer + words.INNER)
    router, scores = integer_at(layer + words.ROUTER), integer_at(job + words.SCORES)
    multiply(job, router, 0, x, hidden, integer_at(job + words.SCORE_PANELS), scores, 0, 0, thread, stage)
    _choose(job, layer, thread, stage + size)
    _group(job, layer, thread, stage + 2 * size)
    _gather(job, layer, x, thread, stage + 3 * size)
    used, firsts = integer_at(job + words.USED), integer_at(job + words.FIRSTS)
    gate(job, layer, integer_at(job + words.GATHERED), used, firsts, private, thread, stage + 4 * size)
    down, fed, outputs = integer_at(layer + words.DOWN), integer_at(job + words.FED), integer_at(job + words.OUTPUTS)
    multiply(job, down, 0, fed, inner, hidden // PANEL, outputs, used, firsts, thread, stage + 5 * size)
    _add_up(job, layer, thread, stage + 6 * size)


@njit(nogil=True)
def _choose(job, layer, thread, stage):
    """Writes the experts of each line, the best first, and their shares."""
    lines, threads = integer_at(job + words.LINES), integer_at(job + words.THREADS)
    width, chosen = PANEL_BYTES * integer_at(job + words.SCORE_PANELS), integer_at(job + words.CHOSEN)
    pieces = (lines + _AT_ONCE - 1) // _AT_ONCE
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        for line in range(piece * _AT_ONCE, min(lines, (piece + 1) * _AT_ONCE)):
            _choose_line(
                integer_at(job + words.SCORES) + line * width,
                integer_at(job + words.EXPERTS),
                chosen,
                integer_at(layer + words.RENORMALISED) != 0,
                integer_at(job + words.SHARES) + 4 * line * chosen,
                integer_at(job + words.CHOICES) + 8 * line * chosen,
            )
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)


@njit(nogil=True)
def _choose_line(scores, experts, chosen, renormalised, shares, choices):
    """Chooses by the softmax of all scores, which are overwritten; the lower expert first among equals."""
    most = number_at(scores)
    for expert in range(1, experts):
        most = max(most, number_at(scores + 4 * expert))
    whole = 0.0
    for expert in range(experts):
        share = first_of(exp_lanes(spread(number_at(scores + 4 * expert) - most)))
        put_number(scores + 4 * expert, share)
        whole += share
    taken = 0.0
    for choice in range(chosen):
        best = 0
        for expert in range(1, experts):
            if number_at(scores + 4 * expert) > number_at(scores + 4 * best):
                best = expert
        share = number_at(scores + 4 * best)
        put_number(scores + 4 * best, _NONE)
        put_number(shares + 4 * choice, share)
        put_integer(choices + 8 * choice, best)
        taken += share
    divisor = taken if renormalised else whole
    for choice in range(chosen):
        put_number(shares + 4 * choice, number_at(shares + 4 * choice) / divisor)


@njit(nogil=True)
def _group(job, layer, thread, stage):
    """Writes the places of pairs in the order of their experts, and which experts are used; one thread does it."""
    threads = integer_at(job + words.THREADS)
    if take(stage, thread, threads, 1) < 1:
        experts, choices = integer_at(job + words.EXPERTS), integer_at(job + words.CHOICES)
        pairs = integer_at(job + words.LINES) * integer_at(job + words.CHOSEN)
        used, firsts = integer_at(job + words.USED), integer_at(job + words.FIRSTS)
        for expert in range(experts + 1):
            put_integer(firsts + 8 * expert, 0)
        for pair in range(pairs):
            count = firsts + 8 * (integer_at(choices + 8 * pair) + 1)
            put_integer(count, integer_at(count) + 1)
        number = 0
        for expert in range(experts):
            count = integer_at(firsts + 8 * (expert + 1))
            if count > 0:
                number += 1
                put_integer(used + 8 * number, expert)
            put_integer(firsts + 8 * (expert + 1), integer_at(firsts + 8 * expert) + count)
        put_integer(used, number)
        free = firsts + 8 * (experts + 1)
        for expert in range(experts):
            put_integer(free + 8 * expert, integer_at(firsts + 8 * expert))
        for pair in range(pairs):
            at = free + 8 * integer_at(choices + 8 * pair)
            put_integer(integer_at(job + words.SLOTS) + 8 * pair, integer_at(at))
            put_integer(at, integer_at(at) + 1)
        done(stage, threads, 1)
    finish(stage, threads, 1)


@njit(nogil=True)
def _gather(job, layer, x, thread, stage):
    """Copies each pair's line to its place."""
    lines, threads = integer_at(job + words.LINES), integer_at(job + words.THREADS)
    chosen = integer_at(job + words.CHOSEN)
    size = integer_at(job + words.HIDDEN) * (2 if takes_pairs(integer_at(job + words.KIND)) else 4)
    pieces = (lines + _AT_ONCE - 1) // _AT_ONCE
    piece = take(stage, thread, threads, pieces)
    while piece < pieces:
        for line in range(piece * _AT_ONCE, min(lines, (piece + 1) * _AT_ONCE)):
            for choice in range(chosen):
                slot = integer_at(integer_at(job + words.SLOTS) + 8 * (line * chosen + choice))
                to = integer_at(job + words.GATHERED) + slot * size
                # A row is a multiple of 32 bytes. It is copied in whole numbers of 8.
                for at in range(0, size, 8):
                    put_integer(to + at, integer_at(x + line * size + at))
        done(stage, threads, pieces)
        piece = take(stage, thread, threads, pieces)
    finish(stage, threads, pieces)


@njit(nogil=True)
def _add_up(job, layer, thread, stage):
    """Adds each line's outputs, by their shares and in the order of its choice, to its states."""
    lines, threads = integer_at(job + words.LINES), integer_at(job + words.THREADS)
    hidden, chosen = integer_at(job + words.HIDDEN), integer_at(job + words.CHOSEN)
    outputs, slots = integer_at(job + words.OUTPUTS), integer_at(job + words.SLOTS)
    piece = take(stage, thread, threads, lines)
    while piece < lines:
        states, shares = integer_at(job + words.STATES) + 4 * piece * hidden, integer_at(job + words.SHARES)
        for at in range(0, 4 * hidden, 64):
            found = spread(0.0)
            for pair in range(piece * chosen, (piece + 1) * chosen):
                output = outputs + 4 * hidden * integer_at(slots + 8 * pair)
                found = fma(spread(number_at(shares + 4 * pair)), load(output + at), found)
            store(states + at, load(states + at) + found)
        done(stage, threads, lines)
        piece = take(stage, thread, threads, lines)
    finish(stage, threads, lines)
