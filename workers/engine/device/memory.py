"""The memory of a GPU that KV may take: what is left after the largest steps were run and measured.

It knows bytes and how to run steps. It does not know the model. The log names each term of the sum.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from workers.engine.device.steps import Steps
from workers.engine.kv.kv_store import KVStore, available_bytes
from workers.engine.sizing import capacity
from workers.engine.sizing.capacity import MemoryPlan, Need
from workers.engine.values.plan import Row, SampleSpec
from workers.protocol.messages import SamplingParams

log = logging.getLogger(__name__)

_DRAWN = SamplingParams(
    seed=1, temperature=0.8, top_p=0.9, top_k=50, logprobs=5, repetition_penalty=1.1, logit_bias=((0, 1.0),)
)


@dataclass(frozen=True, slots=True)
class Largest:
    """Bounds of a step."""

    num_tokens: int
    num_rows: int
    max_model_len: int
    block_size: int

    def many_rows(self) -> list[Row]:
        """Returns as many rows as fit, each with its share of the tokens and a draw with every sampling option on."""
        number = min(self.num_rows, self.num_tokens)
        length = min(self.num_tokens // number, self.max_model_len - 1)
        per_row = -(-length // self.block_size)
        return [self._row(row_id, length, 1 + row_id * per_row) for row_id in range(number)]

    def one_row(self) -> list[Row]:
        """Returns a single chunk with all the tokens."""
        return [self._row(0, min(self.num_tokens, self.max_model_len - 1), 1)]

    def num_blocks(self) -> int:
        """Returns the number of blocks that either batch needs, the null block included."""
        return 1 + max(row.block_table[-1] for row in (*self.many_rows(), *self.one_row()))

    def _row(self, row_id: int, length: int, first: int) -> Row:
        table = range(first, first - (-length // self.block_size))
        draw = SampleSpec(_DRAWN, row_id, length, (), ())
        return Row([0] * length, 0, list(table), (draw,), row_id=row_id)


def warm_up(store: KVStore, largest: Largest, steps: Steps) -> None:
    """Runs the largest steps if they fit the store, so that kernels compile now and not before the first request."""
    if largest.num_blocks() <= store.num_blocks:
        for rows in (largest.many_rows(), largest.one_row()):
            steps.launch(rows).collect()
        steps.forget()


def measure(
    store: KVStore, device: torch.device, share: float, largest: Largest, steps: Steps, num_graphs: int, need: Need
) -> int:
    """Runs the largest steps over a small store, gives that store up, and returns how many blocks the device holds.
    Raises ModelError with the numbers."""
    store.resize(largest.num_blocks() + largest.num_rows)

    def prefill() -> None:
        for rows in (largest.many_rows(), largest.one_row()):
            steps.launch(rows).collect()

    activations = _peak(device, prefill)
    decode = _peak(device, steps.try_decode)
    steps.forget()
    store.resize(0)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    graphs = decode + num_graphs * capacity.GRAPH_BYTES if num_graphs else 0
    plan = MemoryPlan(total, share, total - free, max(activations, decode), graphs)
    most = capacity.most_blocks(largest.max_model_len, need.block_size)
    number = need.num_blocks(plan.kv, most, plan.terms())
    log.info(
        "%d KV blocks of %d bytes: %s",
        number,
        need.bytes_per_block,
        plan.terms(),
        extra={"event": "kv_planned", "num_blocks": number, "kv": plan.kv, **asdict(plan)},
    )
    return number


def refuse_large_weights(weights: int, device: torch.device, share: float, num_ranks: int) -> None:
    """Refuses weights that do not fit into memory, before they are read. `weights` are the bytes of this rank. Raises
    ModelError with the numbers."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        has = int(total * share) - (total - free)
        terms = f"{share:.0%} of {capacity.in_words(total)} less what others use"
    else:
        has = available_bytes() // num_ranks
        terms = "the free memory" if num_ranks == 1 else "its part of the free memory"
    if weights > has:
        raise capacity.does_not_fit(weights, has, terms=terms)


def _peak(device: torch.device, run: Callable[[], None]) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before
