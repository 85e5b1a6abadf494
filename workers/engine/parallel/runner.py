"""The runner of a worker with several ranks: rank 0's own runner, which sends each step to the others before it runs
it.

It knows `StepRunner` on both sides. It does not know tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from workers.engine.parallel.ranks import Ranks
from workers.engine.parallel.wire import (
    Channel,
    CopyBlocks,
    Execute,
    Leave,
    Loaded,
    MoveTokens,
    frame,
    parts_of,
    rows_of,
)
from workers.engine.values.errors import ModelError
from workers.engine.values.plan import AdapterWeights, LoadedAdapter, Row, RowResult, StepRunner, Ticket


class OutOfStep(BaseException):
    """Rank 0 failed inside a step that the others may still be in, so no later step can be right. It is not an
    `Exception`, because the engine handles an `Exception` as the failure of a single step."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that all ranks have begun. An error in it is an error in all later ones."""

    ticket: Ticket
    ranks: Ranks

    def collect(self) -> list[RowResult]:
        with _together(self.ranks):
            return self.ticket.collect()


class ParallelRunner:
    """The `StepRunner` of rank 0's engine."""

    lag = 0
    """No step is launched ahead: the other ranks get a drawn token from rank 0, which must have collected it."""

    def __init__(self, runner: StepRunner, ranks: Ranks) -> None:
        """Waits until the other ranks have loaded."""
        self._runner = runner
        self._ranks = ranks
        self.root = runner.root
        self.block_size = runner.block_size
        self.num_blocks = runner.num_blocks
        self.bytes_per_block = runner.bytes_per_block
        self.max_model_len = runner.max_model_len
        self.eos_token_ids = runner.eos_token_ids
        self.vocab_size = runner.vocab_size
        self.vocabulary = runner.vocabulary
        self.kernels = runner.kernels
        self.graphs = runner.graphs
        self.takes_trees = runner.takes_trees
        self.abilities = runner.abilities
        self.adapters: dict[str, LoadedAdapter] = {}  # adapters are not sent to ranks
        ranks.wait_until_loaded()

    def launch(self, rows: Sequence[Row]) -> Ticket:
        self._ranks.send(Execute(parts_of(rows, self.block_size)))
        with _together(self._ranks):
            return _Step(self._runner.launch(rows), self._ranks)

    def execute(self, rows: Sequence[Row]) -> list[RowResult]:
        return self.launch(rows).collect()

    def read_adapter(self, directory: Path) -> AdapterWeights:
        raise ModelError("Adapters cannot be combined with tensor parallelism.")

    def add_adapter(self, name: str, weights: AdapterWeights) -> None:
        raise NotImplementedError

    def remove_adapter(self, name: str) -> None:
        raise NotImplementedError

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._ranks.send(CopyBlocks(list(pairs)))
        with _together(self._ranks):
            self._runner.copy_blocks(pairs)

    def move_tokens(self, moves: Sequence[tuple[int, int]]) -> None:
        self._ranks.send(MoveTokens(list(moves)))
        with _together(self._ranks):
            self._runner.move_tokens(moves)


@contextlib.contextmanager
def _together(ranks: Ranks) -> Iterator[None]:
    """Returns a context for work that all ranks do. Raises OutOfStep for whatever rank 0 raises."""
    try:
        yield
    except Exception as error:
        ranks.wait_for_news()
        raise OutOfStep(f"rank 0 failed in a step: {error}") from error


def follow(runner: StepRunner, channel: Channel) -> None:
    """Runs the loop of every other rank: it does what rank 0 does, until rank 0 sends `Leave` or closes the channel."""
    channel.send(frame(Loaded()))
    while True:
        match channel.receive():
            case Execute(rows):
                runner.execute(rows_of(rows))
            case CopyBlocks(pairs):
                runner.copy_blocks(pairs)
            case MoveTokens(moves):
                runner.move_tokens(moves)
            case Leave() | None:
                return
