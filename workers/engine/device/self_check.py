"""At start every kernel is compared with its plain-torch twin, on the device, at the model's own shapes.

It knows ops and what they need as input. It does not know the model beyond its sizes. A kernel that gives another
result, or raises, is replaced by its twin; a wrong token is worse than a slow one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedModel

from kernels.arguments.batch import DeviceRows, PagedBatch, Slots, StepInputs
from kernels.arguments.draws import NO_TOKEN, DrawTensors, EditTensors, num_words
from kernels.dispatch import TWINS, Ops
from kernels.reference.quant import quantize
from workers.engine.kv.kv_store import KVShape, LayerKV
from workers.engine.layers import quant
from workers.engine.model.hf import AttentionSite
from workers.engine.sizing.capacity import Format
from workers.engine.values.plan import KernelState

log = logging.getLogger(__name__)

_QUANTIZED_TOLERANCE = 1e-2
"""Least tolerance of floating-point results where KV is 8-bit: about one step of 127."""
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Tolerances relative to the largest expected number: sums in another order round differently. Integers have to be
equal."""
_CONTEXTS = (0, 1, 15, 16, 63, 130, 300)
"""Numbers of tokens before a query: values near the sizes of blocks and tiles, and values with more than one split."""
_CHUNKS = ((0, 5), (3, 17), (64, 70), (130, 1))
"""Context and length of each chunk."""


@dataclass(frozen=True, slots=True)
class Attention:
    """One way in which layers of the model attend."""

    scale: float
    window: int
    softcap: float
    has_sinks: bool


@dataclass(frozen=True, slots=True)
class Shapes:
    kv: KVShape
    dtype: torch.dtype
    """The dtype of the model; KV may be 8-bit."""
    num_heads: int
    hidden: int
    vocab_size: int
    attention: Sequence[Attention]


def shapes_of(model: PreTrainedModel, kv: KVShape, sites: Sequence[AttentionSite]) -> Shapes:
    ways = {Attention(s.scale, s.window, s.softcap, s.has_sinks): None for s in sites}
    config = model.config
    sizes = (sites[0].num_heads, config.hidden_size, config.vocab_size)
    return Shapes(kv, model.dtype, *sizes, tuple(ways))


@dataclass(slots=True)
class Bench:
    """A source of inputs: the same order of calls gives the same inputs."""

    shapes: Shapes
    device: torch.device
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator(self.device).manual_seed(20)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.device)
        return values.to(self.shapes.dtype if dtype is None else dtype)

    def integers(
        self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int32
    ) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def kv(self, *blocks: int) -> LayerKV:
        """Returns KV of the given number of blocks, or of layers and blocks in each."""
        kv = self.shapes.kv
        values = self.random(*blocks, 2, kv.num_kv_heads, kv.block_size, kv.head_dim)
        if not kv.is_quantized:
            return values, None
        return quantize(values, kv.dtype)

    def batch(self, contexts: Sequence[int], lengths: Sequence[int]) -> tuple[PagedBatch, int]:
        """Returns rows with their own blocks, highest ids first, and the number of blocks there must be."""
        size = self.shapes.kv.block_size
        counts = [-(-(c + n) // size) for c, n in zip(contexts, lengths, strict=True)]
        last, tables = sum(counts), []
        for count in counts:
            tables.append(self.integers(range(last, last - count, -1), torch.int64))
            last -= count
        return PagedBatch(list(lengths), list(contexts), tables, size), sum(counts) + 1


Case = Callable[[Ops, Bench], list[torch.Tensor]]


def _advance_rows(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    rows = _device_rows(bench)
    ops.advance_rows(rows, bench.integers((3, -1, 0, 5)), bench.integers((7, 8, 9, 10), torch.int64))
    return [rows.last_tokens, rows.positions]


def _input_prep(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    number, rows = 4, _device_rows(bench)
    tokens, positions, slots = (torch.full((number,), 77, device=bench.device) for _ in range(3))
    lens = torch.full((number,), 77, dtype=torch.int32, device=bench.device)
    table = torch.full((number, 8), 77, dtype=torch.int32, device=bench.device)
    inputs = StepInputs(tokens, positions, slots, lens, table)
    ops.input_prep(inputs, rows, bench.integers((2, 5, -1, 0)), bench.shapes.kv.block_size)
    return [tokens, positions, slots, lens, table]


def _device_rows(bench: Bench) -> DeviceRows:
    size = bench.shapes.kv.block_size
    positions = bench.integers((0, 1, size - 1, size, 2 * size + 3, 5 * size))
    table = bench.integers(range(1, 49)).view(6, 8).contiguous()
    return DeviceRows(bench.integers((11, 12, 13, 14, 15, 16)), positions, table)


def _attention_decode(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    batch, num_blocks = bench.batch(_CONTEXTS, [1] * len(_CONTEXTS))
    return _attend(ops.attention_decode, bench, batch, num_blocks)


def _attention_prefill(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    contexts, lengths = zip(*_CHUNKS, strict=True)
    batch, num_blocks = bench.batch(contexts, lengths)
    return _attend(ops.attention_prefill, bench, batch, num_blocks)


def _attend(op: Callable[..., None], bench: Bench, batch: PagedBatch, num_blocks: int) -> list[torch.Tensor]:
    shapes = bench.shapes
    kv, scales = bench.kv(num_blocks)
    query = bench.random(batch.starts[-1], shapes.num_heads, shapes.kv.head_dim)
    results = []
    for how in shapes.attention:
        out = torch.full_like(query, float("nan"))
        sinks = bench.random(shapes.num_heads) if how.has_sinks else None
        op(out, query, kv, batch, how.scale, how.window, how.softcap, sinks, scales)
        results.append(out)
    return results


def _kv_write(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    shape, size = bench.shapes.kv, bench.shapes.kv.block_size
    kv, scales = bench.kv(4)
    key, value = bench.random(2, 4, shape.num_kv_heads, shape.head_dim)
    slots = bench.integers((2 * size, -1, 3 * size - 1, size), torch.int64)
    ops.kv_write(kv, key, value, Slots(slots, size), scales)
    return _values(kv, scales)


def _values(kv: torch.Tensor, scales: torch.Tensor | None) -> list[torch.Tensor]:
    """Returns 8-bit KV as the values it stands for, because the last bit may be rounded either way."""
    return [kv if scales is None else kv.float() * scales[..., None]]


def _block_copy(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    kv, scales = bench.kv(2, 6)
    source, target = bench.integers(((1, 4), (5, 2)), torch.int64)
    ops.block_copy(kv, source, target, scales)
    return _values(kv, scales)


def _gather_blocks(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    kv, scales = bench.kv(2, 6)
    staging, staging_scales = bench.kv(3, 2)
    ids = bench.integers((5, 1, 4), torch.int64)
    ops.gather_blocks(staging, kv, ids, staging_scales, scales)
    return _values(staging, staging_scales)


def _scatter_blocks(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    kv, scales = bench.kv(2, 6)
    staging, staging_scales = bench.kv(3, 2)
    ids = bench.integers((5, 1, 4), torch.int64)
    ops.scatter_blocks(kv, staging, ids, scales, staging_scales)
    return _values(kv, scales)


def _gated(name: str) -> Case:
    def run(ops: Ops, bench: Bench) -> list[torch.Tensor]:
        x = bench.random(5, 2 * bench.shapes.hidden)
        out = torch.full_like(x[:, : bench.shapes.hidden].contiguous(), float("nan"))
        getattr(ops, name)(out, x)
        return [out]

    return run


def _rope_inputs(bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a table of 600 positions, and five positions."""
    angles = bench.random(600, bench.shapes.kv.head_dim // 2, dtype=torch.float32)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    return table, bench.integers((0, 1, 17, 299, 599), torch.int64)


def _rope(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    table, positions = _rope_inputs(bench)
    x = bench.random(5, bench.shapes.num_heads, bench.shapes.kv.head_dim)
    out = torch.full_like(x, float("nan"))
    ops.rope(out, x, table, positions)
    return [out]


def _rope_kv_write(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    kv_shape, size = bench.shapes.kv, bench.shapes.kv.block_size
    table, positions = _rope_inputs(bench)
    slots = Slots(bench.integers((2 * size, -1, 3 * size - 1, size, size + 1), torch.int64), size)
    norms = (bench.random(kv_shape.head_dim), bench.random(kv_shape.head_dim))
    results = []
    for weights in (None, norms):
        width = bench.shapes.num_heads + 2 * kv_shape.num_kv_heads
        kv, scales = bench.kv(4)
        qkv = bench.random(5, width * kv_shape.head_dim)
        ops.rope_kv_write(kv, qkv, table, positions, slots, weights, 1e-6, kv_scales=scales)
        results += [*_values(kv, scales), qkv[:, : bench.shapes.num_heads * kv_shape.head_dim]]
    return results


def _rms_norm(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    x, residual = bench.random(2, 5, bench.shapes.hidden)
    weight, out = bench.random(bench.shapes.hidden), torch.full_like(x, float("nan"))
    alone = torch.full_like(x, float("nan"))
    ops.rms_norm(alone, x, weight, 1e-6)
    ops.rms_norm(out, x, weight, 1e-6, residual)
    return [alone, out, residual]


def _sample(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    logits = 3.0 * bench.random(5, bench.shapes.vocab_size, dtype=torch.float32)
    draws = ((1.0, 1.0, 0.0), (0.7, 0.9, 0.0), (1.5, 1.0, 0.05), (1.0, 0.5, 0.0), (0.0, 1.0, 0.0))
    numbers = torch.tensor(draws, device=bench.device)
    temperature, top_p, min_p = (line.contiguous() for line in numbers.T)
    top_k = bench.integers((0, 20, 0, 3, 0), torch.int64)
    seeds = bench.integers(((1, 0), (2, 7), (3, 0xFFFFFFFF), (4, 1), (5, 5)), torch.int64)
    positions = bench.integers((0, 5, 100, 100_000, 3), torch.int64)
    return [ops.sample(logits, DrawTensors(temperature, top_k, top_p, min_p, seeds, positions))]


def _logits(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    vocab, inf = bench.shapes.vocab_size, float("inf")
    raw = bench.random(3, vocab, dtype=torch.float32)
    counts = torch.zeros((2, vocab), dtype=torch.int32, device=bench.device)
    counts[1, ::5] = 2
    words = num_words(vocab)
    edits = EditTensors(
        penalty_lines=bench.integers((1, -1, 0)),
        repetition=torch.tensor((1.3, 1.0, 0.8), device=bench.device),
        frequency=torch.tensor((0.5, 0.0, 0.0), device=bench.device),
        presence=torch.tensor((-0.2, 0.0, 0.4), device=bench.device),
        prompt_bits=bench.integers(range(2 * words)).view(2, words),
        counts=counts,
        bias_tokens=bench.integers(((0, 7), (3, NO_TOKEN), (NO_TOKEN, NO_TOKEN))),
        biases=torch.tensor(((1.5, -2.0), (-inf, 0.0), (0.0, 0.0)), device=bench.device),
        mask_lines=bench.integers((-1, -1, 0)),
        mask_bits=torch.full((1, words), 0x5A5A5A5A, dtype=torch.int32, device=bench.device),
    )
    out = torch.full_like(raw, float("nan"))
    ops.logits(out, raw, edits, torch.tensor((1.0, 0.7, 0.0), device=bench.device))
    return [out.clamp(min=-1e4)]


def _count_tokens(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    counts = torch.zeros((3, bench.shapes.vocab_size), dtype=torch.int32, device=bench.device)
    ops.count_tokens(counts, bench.integers((2, -1, 0)), bench.integers((5, 6, 7), torch.int64))
    return [counts]


def _verify(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    draws = bench.integers(((4, 5, 6), (4, 5, 6), (1, 2, 3)), torch.int64)
    proposals = bench.integers(((4, 5), (9, 5), (1, 0)), torch.int64)
    accepted = torch.full((3,), 77, dtype=torch.int32, device=bench.device)
    following = torch.full((3,), 77, device=bench.device)
    ops.verify(accepted, following, draws, proposals, bench.integers((2, 2, 1)))
    return [accepted, following]


def _quantized(kind: Format) -> Case:
    """Returns the case of a layer in this format, as the model has them: few rows and many rows use different
    kernels. It has inputs enough for a product of few rows to be split."""

    def run(ops: Ops, bench: Bench) -> list[torch.Tensor]:
        layer = quant.linear_maker(kind, ops)(bench.random(96, 1024), bench.random(96), None)
        return [layer(bench.random(5, 1024)), layer(bench.random(70, 1024))]

    return run


def _route_experts(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    order = bench.integers([(5 * expert + 3) % 16 for expert in range(16)] * 3).view(3, 16)
    weights = bench.random(3, 2, dtype=torch.float32)
    experts = bench.integers([-1] * 6).view(3, 2)
    ops.weights.route_experts(weights, experts, (order / 4).to(bench.shapes.dtype), True)
    return [weights, experts]


def _moe(ops: Ops, bench: Bench) -> list[torch.Tensor]:
    """Runs the op on few tokens and on many, because their tiles differ."""
    stacks = (bench.random(3, 64, 64) / 8, bench.random(3, 64, 32) / 8)
    outs = []
    for num_tokens in (5, 40):
        x, shares = (bench.random(num_tokens, n, dtype=d) for n, d in ((64, None), (2, torch.float32)))
        experts = bench.integers([-1, 2, 0, 1] * (num_tokens // 2 + 1))[: 2 * num_tokens]
        outs.append(torch.full_like(x, float("nan")))
        ops.weights.moe(outs[-1], x, *stacks, shares, experts.view(-1, 2))
    return outs


CASES: dict[str, Case] = {
    "advance_rows": _advance_rows,
    "attention_decode": _attention_decode,
    "attention_prefill": _attention_prefill,
    "block_copy": _block_copy,
    "count_tokens": _count_tokens,
    "gather_blocks": _gather_blocks,
    "gelu_mul": _gated("gelu_mul"),
    "input_prep": _input_prep,
    "kv_write": _kv_write,
    "linear_fp8": _quantized("fp8"),
    "linear_w4": _quantized("int4"),
    "linear_w8": _quantized("int8"),
    "linear_w8a8": _quantized("w8a8"),
    "logits": _logits,
    "moe": _moe,
    "quantize_tokens": _quantized("w8a8"),
    "rms_norm": _rms_norm,
    "rope": _rope,
    "rope_kv_write": _rope_kv_write,
    "route_experts": _route_experts,
    "sample": _sample,
    "scatter_blocks": _scatter_blocks,
    "silu_mul": _gated("silu_mul"),
    "verify": _verify,
}


def checked(ops: Ops, shapes: Shapes) -> tuple[Ops, list[KernelState]]:
    """Returns the ops, with every kernel that failed replaced, and the state of each kernel."""
    twins = dataclasses.replace(ops, chosen=dict(TWINS))
    chosen, states = dict(ops.chosen), []
    for name in sorted(ops.chosen):
        state: Literal["twin", "equal", "differs", "unchecked"] = "twin"
        if ops.chosen[name] is not TWINS[name]:
            fault = _fault(name, ops, twins, shapes)
            state = "equal" if not fault else "differs" if name in CASES else "unchecked"
            if state == "differs":
                chosen[name] = TWINS[name]
            if fault:
                level = logging.WARNING if state == "differs" else logging.INFO
                log.log(level, "kernel %s: %s", name, fault, extra={"event": f"kernel_{state}"})
        on_device = chosen[name] is not TWINS[name]
        states.append(KernelState(name, "triton" if on_device else "torch", state))
    return dataclasses.replace(ops, chosen=chosen), states


def _fault(name: str, ops: Ops, twins: Ops, shapes: Shapes) -> str:
    if name not in CASES:
        return "there is nothing to compare it with at start"
    case = CASES[name]
    try:
        found = case(ops, Bench(shapes, ops.device))
        expected = case(twins, Bench(shapes, ops.device))
        errors = [_error(a, b) for a, b in zip(found, expected, strict=True)]
    except Exception as error:  # noqa: BLE001  # a compiler or a launch may raise anything, and the twin works
        return f"its twin takes its place, it raised {type(error).__name__}: {error}"
    limits = [_tolerance(tensor.dtype, shapes) for tensor in expected]
    if all(error <= limit for error, limit in zip(errors, limits, strict=True)):
        return ""
    return f"its twin takes its place, it is off by {max(errors):.1e} of the largest number"


def _tolerance(dtype: torch.dtype, shapes: Shapes) -> float:
    exact = _TOLERANCE.get(dtype, 0.0)
    return max(exact, _QUANTIZED_TOLERANCE) if exact and shapes.kv.is_quantized else exact


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns the largest difference, relative to the largest number; it is not a number if one of the two is not."""
    if not expected.is_floating_point():
        return float((found != expected).any())
    found, expected = found.double(), expected.double()
    return ((found - expected).abs().max() / expected.abs().max()).item()
