"""Processes logits before a draw: edits, temperature, and sums of a row that need only one read of it.

A program processes one segment of a row. It writes the largest logit of the segment and of many small chunks of it, and
the sums of exponentials, so that `kernels.triton.sampling.sample` can bound its thresholds without a sort. Order of the
edits: `kernels.reference.logits`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from kernels.arguments.draws import COLDEST, EditTensors, Geometry, Workspace, geometry
from kernels.triton.specimen import Budget, Specimen

LOG2E = tl.constexpr(1.4426950408889634)
_COLDEST = tl.constexpr(COLDEST)
_INFINITY = tl.constexpr(float("inf"))
_LAST = tl.constexpr(2**31 - 1)
_NUM_WARPS = 4
_COUNTED = 128
"""Number of rows per program of `count_tokens`."""
_BIASES = tl.constexpr(128)
"""Number of biases that are read at a time to find the first one of a segment."""


@triton.jit
def _online(peak, mass, tile):
    """Returns the running largest value and sum of exponentials per lane of `[runs, lanes]` tiles (Milakov and
    Gimelshein 2018)."""
    higher = tl.maximum(peak, tl.max(tile, axis=0))
    base = tl.where(higher == -_INFINITY, 0.0, higher)
    grown = tl.sum(tl.exp2((tile - base[None, :]) * LOG2E), axis=0)
    return higher, mass * tl.exp2((peak - base) * LOG2E) + grown


@triton.jit
def _store_mass(place, step, peak, mass):
    top = tl.max(peak, axis=0)
    base = tl.where(top == -_INFINITY, 0.0, top)
    tl.store(place, top)
    tl.store(place + step, tl.sum(mass * tl.exp2((peak - base) * LOG2E), axis=0))


@triton.jit
def _bits(words, column, inside):
    word = tl.load(words + (column >> 5), mask=inside, other=0)
    return ((word >> (column & 31)) & 1) != 0


@triton.jit
def _penalized(value, row, line, repetition, frequency, presence, prompt_bits, counts, column, inside, vocab, words):
    count = tl.load(counts + line * vocab + column, mask=inside, other=0)
    drawn = count > 0
    penalty = tl.load(repetition + row)
    # A product with the inverse: one bit off a division at most, and a third of its registers.
    scaled = value * tl.where(value < 0, penalty, 1.0 / penalty)
    value = tl.where(drawn | _bits(prompt_bits + line * words, column, inside), scaled, value)
    change = tl.load(frequency + row) * count.to(tl.float32)
    return value - (change + tl.where(drawn, tl.load(presence + row), 0.0))


@triton.jit(do_not_specialize=["num_biases"])
def _scan(
    out,
    raw,
    temperature,
    peaks,
    chunk_peaks,
    best_tokens,
    penalty_lines,
    repetition,
    frequency,
    presence,
    prompt_bits,
    counts,
    bias_tokens,
    biases,
    mask_lines,
    mask_bits,
    vocab,
    out_stride,
    raw_stride,
    words,
    num_biases,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    RUNS: tl.constexpr,
    LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDITS: tl.constexpr,
    RAW: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1)
    heat = tl.load(temperature + row)
    greedy = heat < _COLDEST
    offset = tl.arange(0, RUNS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    divisor = tl.where(greedy, 1.0, heat) + tl.zeros((RUNS, LANES), tl.float32)
    peak = tl.full((LANES,), -_INFINITY, tl.float32)
    mass = tl.zeros((LANES,), tl.float32)
    raw_peak, raw_mass = peak, mass
    best = tl.zeros((LANES,), tl.int32)
    if EDITS:
        line = tl.load(penalty_lines + row).to(tl.int64)
        mask_line = tl.load(mask_lines + row).to(tl.int64)
        bias_tokens += row * num_biases
        biases += row * num_biases
        place = 0
        for first in range(0, num_biases, _BIASES):
            entry = first + tl.arange(0, _BIASES)
            tokens = tl.load(bias_tokens + entry, mask=entry < num_biases, other=_LAST)
            place += tl.sum((tokens < segment * SEGMENT).to(tl.int32), axis=0)
        biased = tl.load(bias_tokens + place, mask=place < num_biases, other=_LAST)
    for start in range(segment * SEGMENT, tl.minimum(vocab, (segment + 1) * SEGMENT), RUNS * LANES):
        column = start + offset
        inside = column < vocab
        value = tl.load(raw + row * raw_stride + column, mask=inside, other=-_INFINITY)
        if RAW:
            raw_peak, raw_mass = _online(raw_peak, raw_mass, value)
        if EDITS:
            if line >= 0:
                value = _penalized(
                    value, row, line, repetition, frequency, presence, prompt_bits, counts, column, inside, vocab, words
                )
            while biased < start + RUNS * LANES:
                value += tl.where(column == biased, tl.load(biases + place), 0.0)
                place += 1
                biased = tl.load(bias_tokens + place, mask=place < num_biases, other=_LAST)
            if mask_line >= 0:
                allowed = _bits(mask_bits + mask_line * words, column, inside)
                value = tl.where(allowed, value, -_INFINITY)
        value = tl.div_rn(value, divisor)
        if EDITS:
            tl.store(out + row * out_stride + column, value, mask=inside)
        if greedy:
            here = tl.max(value, axis=0)
            token = tl.min(tl.where(value == here[None, :], column, _LAST), axis=0)
            best = tl.where(here > peak, token, best)
        peak, mass = _online(peak, mass, value)
    sums = peaks + row * 4 * SEGMENTS + segment
    _store_mass(sums, SEGMENTS, peak, mass)
    if RAW:
        _store_mass(sums + 2 * SEGMENTS, SEGMENTS, raw_peak, raw_mass)
    folded = tl.max(tl.reshape(peak, (CHUNKS, LANES // CHUNKS)), axis=1)
    chunk = (row * SEGMENTS + segment) * CHUNKS + tl.arange(0, CHUNKS)
    tl.store(chunk_peaks + chunk, folded)
    if greedy:
        best = tl.where(peak == tl.max(peak, axis=0), best, _LAST)
        tl.store(best_tokens + row * SEGMENTS + segment, tl.min(best, axis=0))


def logits(
    out: torch.Tensor,
    raw: torch.Tensor,
    edits: EditTensors,
    temperature: torch.Tensor,
    workspace: Workspace | None = None,
) -> None:
    """Computes the same as its twin in `kernels.reference.logits`; afterwards `workspace` holds the scans of `out` and
    `raw`."""
    if workspace is None:
        workspace = Workspace.create(len(raw), select(raw.shape[1]), raw.device)
    scan(raw, temperature, workspace, True, out, edits)


def scan(
    raw: torch.Tensor,
    temperature: torch.Tensor,
    workspace: Workspace,
    with_raw: bool,
    out: torch.Tensor | None = None,
    edits: EditTensors | None = None,
) -> None:
    """Fills the workspace from one read of the rows. With `with_raw` it also writes the sums that logprobs need."""
    rows, vocab = raw.shape
    shape = workspace.geometry
    if edits is None:
        tables: tuple[torch.Tensor, ...] = (raw,) * 10
        words = num_biases = 1
    else:
        tables = (
            edits.penalty_lines,
            edits.repetition,
            edits.frequency,
            edits.presence,
            edits.prompt_bits,
            edits.counts,
            edits.bias_tokens,
            edits.biases,
            edits.mask_lines,
            edits.mask_bits,
        )
        words, num_biases = edits.mask_bits.shape[1], edits.biases.shape[1]
    out = raw if out is None else out
    _scan[(rows, shape.segments)](
        out,
        raw,
        temperature,
        workspace.peaks,
        workspace.chunk_peaks,
        workspace.best_tokens,
        *tables,
        vocab,
        out.stride(0),
        raw.stride(0),
        words,
        num_biases,
        **_constants(shape, edits is not None, with_raw),
        num_warps=_NUM_WARPS,
    )


def select(vocab: int) -> Geometry:
    """Returns the geometry, which is the same for all capabilities."""
    return geometry(vocab)


def _constants(shape: Geometry, edits: bool, with_raw: bool) -> dict[str, int]:
    return {
        "SEGMENT": shape.segment_size,
        "SEGMENTS": shape.segments,
        "RUNS": shape.runs // 2 if edits else shape.runs,  # an edited tile takes more registers
        "LANES": shape.lanes,
        "CHUNKS": shape.chunks,
        "EDITS": edits,
        "RAW": with_raw,
    }


@triton.jit(do_not_specialize=["rows"])
def _count_tokens(counts, lines, tokens, rows, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    line = tl.load(lines + row, mask=row < rows, other=-1)
    used = line >= 0
    token = tl.load(tokens + row, mask=used, other=0)
    place = counts + line.to(tl.int64) * vocab + token
    tl.store(place, tl.load(place, mask=used, other=0) + 1, mask=used)


def count_tokens(counts: torch.Tensor, lines: torch.Tensor, tokens: torch.Tensor) -> None:
    """Computes the same as its twin in `kernels.reference.logits`."""
    rows = len(lines)
    _count_tokens[(triton.cdiv(rows, _COUNTED),)](
        counts, lines, tokens, rows, counts.shape[1], BLOCK=_COUNTED, num_warps=1
    )


def specimens(capability: int) -> Iterator[Specimen]:
    real, whole = torch.float32, torch.int32
    edit_types = (whole, real, real, real, whole, whole, whole, real, whole, whole)
    for vocab, num_biases, edits, with_raw in (
        (151_936, 1, False, False),
        (151_936, 1, False, True),
        (151_936, 320, True, True),
        (50_257, 16, True, True),
    ):
        types = edit_types if edits else (real,) * 10
        words = (vocab + 31) // 32 if edits else 1
        kind = f"edits {num_biases}" if edits else "raw" if with_raw else "plain"
        yield Specimen(
            f"scan {vocab} {kind}",
            _scan,
            (real, real, real, real, real, whole, *types, vocab, vocab, vocab, words, num_biases),
            _constants(select(vocab), edits, with_raw),
            Budget(registers=200 if edits else 80),
            num_warps=_NUM_WARPS,
        )
    yield Specimen(
        "count_tokens",
        _count_tokens,
        (whole, whole, torch.int64, 7, 151_936),
        {"BLOCK": _COUNTED},
        Budget(registers=48),
        num_warps=1,
    )
