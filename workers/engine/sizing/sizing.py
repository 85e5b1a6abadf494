"""Plan for a model on a device: blocks, batches, least times per context, and the settings to start a worker with.

The module is pure. It does not know where the figures come from nor how they are printed. The least times are bounds
that no worker can beat, for one step with nothing else in it. Traffic between ranks is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workers.engine.sizing.capacity import (
    CPU_LIBRARIES,
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
"""Context lengths (prompt and output tokens together) where nothing else was asked for."""
LEASE_TOKENS = 128
"""Number of tokens of a gateway's first lease, which the gateway renews when half is spent."""
STEP_S = 0.05
"""Seconds that a step full of prompts may take, because it delays the streams in it."""
MIN_BATCH_TOKENS, MAX_BATCH_TOKENS = 32, 8192
_SPARE_SHARE = 16
LIBRARIES = GIB
"""Allowance for the memory that CUDA and its libraries hold on each GPU. A worker measures it."""
_NUM_GRAPHS = 20
"""Number of recorded steps of a worker with 256 rows."""
MAX_RUNNING = 256
"""Largest number of rows. Rows beyond the worker's default cost memory for recorded steps and logits, and are rarely
filled."""


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
    """The resource that takes the time: memory or compute."""

    @classmethod
    def of(cls, sides: tuple[float, float]) -> Side:
        read, compute = sides
        return cls(max(sides), "memory" if read >= compute else "compute")


@dataclass(frozen=True, slots=True)
class AtContext:
    """Least times at one length of context. Batches consist of sequences of this length."""

    context: int
    flops_per_token: float
    largest_batch: int
    one: Side
    full: Side | None
    """Least time of a step of the largest batch. The value is None if not even one sequence fits."""
    prefill: Side
    """Least time of a prompt that fills the context, to its first token."""

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
    """Number of blocks that the scheduler keeps free by itself."""
    lease_s: float
    """Least number of seconds that a first lease lasts in a stream that runs alone."""


@dataclass(frozen=True, slots=True)
class Plan:
    weight_bytes: int
    """Bytes of the weights of one rank. All bytes and blocks of the plan are of one rank."""
    kv_bytes: int
    terms: str
    fitting_blocks: int
    """Number of blocks that fit the memory, including the null block."""
    num_blocks: int
    """Number of blocks that a worker takes by itself: no more than its longest sequences could use."""
    process_bytes: int
    """Bytes of one rank's process once its KV is full. The value is 0 for a GPU, whose memory is planned as a whole."""
    knee: float
    """Number of tokens of a step above which it is bound by arithmetic."""
    contexts: tuple[AtContext, ...]
    recommended: Recommended


def plan(rank: Served, context_limit: int, dtype: str, asked: Asked) -> Plan:
    """Returns the plan. Raises ModelError, with the numbers, if not even the shortest context fits."""
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
    process = rank.weight_bytes + taken * bytes_per_block + CPU_LIBRARIES if asked.device.is_cpu else 0
    return Plan(rank.weight_bytes, kv, terms, fitting, taken, process, rank.knee(ceilings), found, recommended)


def longest_safe(num_blocks: int, block_size: int, limit: int) -> int:
    """Returns the length in tokens of the longest sequence to promise. A worker with a configured length refuses to
    start where it does not fit, and its measured memory is not quite the planned one."""
    longest = longest_sequence(num_blocks, block_size)
    return min(limit, longest - longest // _SPARE_SHARE)


def contexts(asked: Sequence[int], limit: int) -> tuple[int, ...]:
    """Returns the context lengths in rising order. Raises ModelError for one that the model was not made for."""
    if asked and max(asked) > limit:
        raise ModelError(f"The model's context ends at {limit} tokens, not at {max(asked)}.")
    return tuple(sorted({*asked})) or tuple(n for n in CONTEXTS if n <= limit) or (limit,)


def batch_tokens(served: Served, ceilings: Ceilings) -> int:
    """Returns the largest power of two of tokens whose step takes at most `STEP_S`. It is at least the knee, because
    below the knee a longer step costs nothing."""
    tokens = MIN_BATCH_TOKENS
    while tokens < MAX_BATCH_TOKENS and (
        tokens < served.knee(ceilings) or served.prefill_s(2 * tokens, ceilings) <= STEP_S
    ):
        tokens *= 2
    return tokens


def kv_memory(served: Served, asked: Asked, num_tokens: int, num_rows: int) -> tuple[int, str]:
    """Returns the bytes for KV on one rank, and where they come from. The number is negative where the weights alone
    are too large."""
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
