"""From a model and a device to a plan: blocks, batches, floors per context, and the settings to start a worker with.

Pure. Does not know where the figures come from nor how they are printed. Floors are bounds that no worker can beat, of
one step with nothing else in it; traffic between ranks is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.engine.sizing.capacity import (
    CPU_TERMS,
    GIB,
    GRAPH_BYTES,
    WATERMARK_SHARE,
    Ceilings,
    MemoryPlan,
    Need,
    Served,
    cpu_kv_bytes,
    longest_sequence,
    most_blocks,
)
from workers.engine.sizing.devices import Device
from workers.engine.values.errors import ModelError

CONTEXTS = (1024, 8192, 32_768)
"""Tokens of prompt and output together, where nothing else was asked for."""
LEASE_TOKENS = 128
"""A gateway's first lease, which it renews when half is spent."""
STEP_S = 0.05
"""What a step full of prompts may cost the streams beside it."""
MIN_BATCH_TOKENS, MAX_BATCH_TOKENS = 32, 8192
_SPARE_SHARE = 16
LIBRARIES = GIB
"""Allowance for what CUDA and its libraries hold on each GPU; a worker measures it."""
_NUM_GRAPHS = 20
"""Recorded steps of a worker with 256 rows."""
MAX_RUNNING = 256
"""Rows beyond the worker's default cost memory for recorded steps and logits, and are rarely filled."""


@dataclass(frozen=True, slots=True)
class Asked:
    device: Device
    num_ranks: int = 1
    block_size: int = 16
    contexts: tuple[int, ...] = ()
    memory_share: float = 0.9


@dataclass(frozen=True, slots=True)
class Side:
    seconds: float
    bound: str
    """memory or compute: what the time goes into."""

    @classmethod
    def of(cls, sides: tuple[float, float]) -> Side:
        read, compute = sides
        return cls(max(sides), "memory" if read >= compute else "compute")


@dataclass(frozen=True, slots=True)
class AtContext:
    """Floors at one length of context; batches are of sequences of this length."""

    context: int
    flops_per_token: float
    largest_batch: int
    one: Side
    full: Side | None
    """Of the largest batch; None: not even one fits."""
    prefill: Side
    """Of a prompt that fills the context, to its first token."""

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.one.seconds

    @property
    def full_tokens_per_s(self) -> float:
        return self.largest_batch / self.full.seconds if self.full else 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.context / self.prefill.seconds


@dataclass(frozen=True, slots=True)
class Recommended:
    max_model_len: int
    max_batch_tokens: int
    max_running: int
    watermark_blocks: int
    """Kept free by the scheduler by itself."""
    lease_s: float
    """What a first lease lasts at least, in a stream that is alone."""


@dataclass(frozen=True, slots=True)
class Plan:
    weight_bytes: int
    """Of one rank, as are all bytes and blocks."""
    kv_bytes: int
    terms: str
    fitting_blocks: int
    """What the memory holds, the null block included."""
    num_blocks: int
    """What a worker takes by itself: no more than its longest sequences could use."""
    knee: float
    """Tokens of a step above which it is bound by arithmetic."""
    contexts: tuple[AtContext, ...]
    recommended: Recommended


def plan(rank: Served, context_limit: int, dtype: str, asked: Asked) -> Plan:
    """Raises ModelError, with the numbers, if not even the shortest context fits."""
    ceilings = asked.device.ceilings(dtype, rank.quant)
    lengths = contexts(asked.contexts, context_limit)
    budget = batch_tokens(rank, ceilings)
    rows = min(MAX_RUNNING, budget)
    kv, terms = kv_memory(rank, asked, budget, rows)
    bytes_per_block = rank.kv_bytes_per_token * asked.block_size
    need = Need(rank.weight_bytes, bytes_per_block, asked.block_size, min(lengths))
    fitting = need.num_blocks(kv, kv // bytes_per_block, terms)
    taken = min(fitting, most_blocks(context_limit, asked.block_size))
    found = tuple(at_context(rank, n, taken, asked.block_size, ceilings) for n in lengths)
    recommended = Recommended(
        longest_safe(taken, asked.block_size, context_limit),
        budget,
        max(1, min(rows, max(each.largest_batch for each in found))),
        max(1, taken // WATERMARK_SHARE),
        LEASE_TOKENS * rank.decode_s([1], ceilings),
    )
    return Plan(rank.weight_bytes, kv, terms, fitting, taken, rank.knee(ceilings), found, recommended)


def longest_safe(num_blocks: int, block_size: int, limit: int) -> int:
    """Tokens of the longest sequence to promise: a worker that is told a length refuses to start where it does not
    fit, and its measured memory is not quite the planned one."""
    longest = longest_sequence(num_blocks, block_size)
    return min(limit, longest - longest // _SPARE_SHARE)


def contexts(asked: Sequence[int], limit: int) -> tuple[int, ...]:
    """Rising. Raises ModelError for one that the model was not made for."""
    if asked and max(asked) > limit:
        raise ModelError(f"The model's context ends at {limit} tokens, not at {max(asked)}.")
    return tuple(sorted({*asked})) or tuple(n for n in CONTEXTS if n <= limit) or (limit,)


def batch_tokens(served: Served, ceilings: Ceilings) -> int:
    """The largest power of two whose step takes at most `STEP_S`; at least the knee, below which a longer step costs
    nothing."""
    tokens = MIN_BATCH_TOKENS
    while tokens < MAX_BATCH_TOKENS and (
        tokens < served.knee(ceilings) or served.prefill_s(2 * tokens, ceilings) <= STEP_S
    ):
        tokens *= 2
    return tokens


def kv_memory(served: Served, asked: Asked, num_tokens: int, num_rows: int) -> tuple[int, str]:
    """Bytes for KV on one rank, and where they come from. Negative where the weights alone are too large."""
    device, weights = asked.device, served.weight_bytes
    if device.is_cpu:
        left = device.memory // asked.num_ranks - weights
        if left < 0:
            return left, "the free memory"
        return cpu_kv_bytes(left * asked.num_ranks, asked.num_ranks), CPU_TERMS
    activations = served.activation_bytes(num_tokens, num_rows)
    graphs = activations // 4 + _NUM_GRAPHS * GRAPH_BYTES if asked.num_ranks == 1 else 0
    used = weights + LIBRARIES
    found = MemoryPlan(device.memory, asked.memory_share, used, activations, graphs)
    return found.kv, found.terms()


def at_context(served: Served, context: int, num_blocks: int, block_size: int, ceilings: Ceilings) -> AtContext:
    batch = (num_blocks - 1) // -(-context // block_size)
    if longest_sequence(num_blocks, block_size) < context:
        batch = 0
    full = Side.of(served.decode_sides([context] * batch, ceilings)) if batch else None
    return AtContext(
        context,
        served.flops_per_token(context),
        batch,
        Side.of(served.decode_sides([context], ceilings)),
        full,
        Side.of(served.prefill_sides(context, ceilings)),
    )
