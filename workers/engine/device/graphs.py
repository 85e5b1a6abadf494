"""Decode steps that are recorded once and then replayed: their sizes, how they are recorded, and what that cost.

It knows functions that launch work on a device, and buckets of rows. It does not know what the functions compute. If
nothing can be recorded (on a CPU, or with an op that needs the host), the same functions are called instead.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.engine.values.plan import GraphState

log = logging.getLogger(__name__)

Launch = Callable[[], None]
_FIRST_BUCKETS = (1, 2, 4, 8, 16)
_BUCKET_STEP = 16
_WARM_UPS = 2
"""Number of runs before a recording: compilation, library handles and autotuned choices cannot happen inside one."""


def bucket_sizes(max_rows: int, smallest: int = 1) -> list[int]:
    """Returns the row counts of the recorded steps in rising order; the last one holds `max_rows`."""
    sizes = [size for size in _FIRST_BUCKETS if smallest <= size < max_rows]
    following = sizes[-1] + _BUCKET_STEP if sizes and sizes[-1] == 16 else None
    while following is not None and following < max_rows:
        sizes.append(following)
        following += _BUCKET_STEP
    return [*sizes, max(max_rows, smallest)]


class Capture(Protocol):
    """A function that turns a launch into one that can be replayed."""

    def __call__(self, launch: Launch) -> Launch: ...


class DirectCall:
    """A capture that records nothing: a replay is a call."""

    def __call__(self, launch: Launch) -> Launch:
        return launch


class CudaCapture:
    """A capture that records into CUDA graphs. They share one pool of memory: only one of them runs at a time, and what
    outlives a replay lies in static buffers outside the pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, launch: Launch) -> Launch:
        for _ in range(_WARM_UPS):
            launch()
        graph = torch.cuda.CUDAGraph()
        # The outer context restores the stream if a recording fails, which the inner one then does not do. Other
        # threads of a worker may use the device meanwhile: only this thread must keep to what can be recorded.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            launch()
        return graph.replay


@dataclass(frozen=True, slots=True)
class Bucket:
    """The two halves of a step of one size, recorded or called."""

    size: int
    forward: Launch
    """Reads inputs from the device rows, runs the pass, and writes the logits."""
    draw: Launch
    """Draws tokens from the logits and feeds them back to the device rows."""
    recorded: bool


class Trial(Protocol):
    """A source of made-up rows to try buckets on."""

    def prepare(self, size: int) -> None:
        """Prepares `size` rows, always the same ones."""
        ...

    def outcome(self, bucket: Bucket) -> list[torch.Tensor]:
        """Prepares the rows, runs both halves, and returns copies of the results."""
        ...


class Graphs:
    """The buckets of a runner. `forward` and `draw` launch a step of the given number of rows on static buffers."""

    def __init__(self, sizes: Sequence[int], forward: Callable[[int], None], draw: Callable[[int], None]) -> None:
        self.sizes = sorted(sizes)
        self._forward = forward
        self._draw = draw
        self._buckets = {size: self.called(size) for size in self.sizes}
        self._states: dict[int, GraphState] = {}

    @property
    def states(self) -> Sequence[GraphState]:
        """The sizes that were to be recorded, in rising order, with what became of each."""
        return [self._states[size] for size in self.sizes if size in self._states]

    def bucket(self, num_rows: int) -> Bucket:
        return self._buckets[self.sizes[bisect.bisect_left(self.sizes, num_rows)]]

    def called(self, size: int) -> Bucket:
        return Bucket(size, lambda: self._forward(size), lambda: self._draw(size), False)

    def record(self, forward: Capture, draw: Capture, trial: Trial) -> None:
        """Records the buckets, the largest first, so that the smaller ones fit into the pool. A bucket whose replay
        gives other bits than its call, or that cannot be recorded, is called from then on."""
        started, before = time.monotonic(), _used_bytes()
        number = 0
        self._states = {size: GraphState(size, "failed") for size in self.sizes}
        for size in reversed(self.sizes):
            called = self.called(size)
            try:
                trial.prepare(size)
                recorded = Bucket(size, forward(called.forward), draw(called.draw), True)
            except RuntimeError as error:
                # If one size cannot be recorded, no other can; a second try could only fail in less clear ways.
                reason = str(error).partition("\n")[0]
                log.warning("no step is recorded, that of %d rows fails: %s", size, reason)
                break
            if equal(trial.outcome(called), trial.outcome(recorded)):
                self._buckets[size] = recorded
                self._states[size] = GraphState(size, "equal")
                number += 1
            else:
                self._states[size] = GraphState(size, "differs")
                log.warning("steps of %d rows are called: their recording gives other bits", size)
        seconds, taken = time.monotonic() - started, _used_bytes() - before
        log.info(
            "%d of %d decode steps recorded in %.1f s, %.0f MiB: %s rows",
            number,
            len(self.sizes),
            seconds,
            taken / 2**20,
            ", ".join(str(size) for size, b in self._buckets.items() if b.recorded) or "no",
            extra={"event": "graphs_recorded", "num_graphs": 2 * number, "seconds": round(seconds, 3), "bytes": taken},
        )


def equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Returns whether all tensors are equal bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _used_bytes() -> int:
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
