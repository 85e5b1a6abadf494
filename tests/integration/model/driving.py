"""Drives a runner by hand-made rows, as the engine would: chunks, late arrivals, block tables in any order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.engine.plan import Draw, Drawn, Row
from workers.engine.runner import ModelRunner
from workers.protocol.messages import SamplingParams

GREEDY = SamplingParams(seed=0, temperature=0.0)


@dataclass
class Driven:
    prompt: list[int]
    params: SamplingParams = GREEDY
    arrival: int = 0
    """First step that may run it."""
    output: list[int] = field(default_factory=list)
    drawn: list[Drawn] = field(default_factory=list)
    num_written: int = 0
    table: list[int] = field(default_factory=list)

    def row(self, chunk: int) -> Row:
        tokens = [*self.prompt, *self.output]
        end = min(len(tokens), self.num_written + chunk)
        draws = ()
        if end == len(tokens):
            draws = (Draw(self.params, self.params.seed, end, self.prompt, self.output),)
        return Row(tokens[self.num_written : end], self.num_written, self.table, draws)


def drive(
    runner: ModelRunner,
    sequences: Sequence[Driven],
    num_tokens: int,
    chunk: int = 1 << 30,
    shuffle_seed: int = 0,
) -> None:
    """Runs every sequence to `num_tokens` output tokens. KV starts poisoned: a slot read before it was written
    shows in every later token."""
    runner.store.tensor.fill_(float("nan"))
    free = list(range(1, runner.num_blocks))
    random.Random(shuffle_seed).shuffle(free)
    for sequence in sequences:
        length = len(sequence.prompt) + num_tokens
        needed = -(-length // runner.block_size)
        sequence.table, free = free[:needed], free[needed:]
        assert len(sequence.table) == needed, "the test's pool is too small"
    step = 0
    while waiting := [s for s in sequences if len(s.output) < num_tokens]:
        running = [s for s in waiting if s.arrival <= step]
        step += 1
        if running:
            _step(runner, running, chunk)


def _step(runner: ModelRunner, running: Sequence[Driven], chunk: int) -> None:
    rows = [sequence.row(chunk) for sequence in running]
    for sequence, row, result in zip(running, rows, runner.execute(rows), strict=True):
        sequence.num_written += len(row.tokens)
        sequence.drawn += result.drawn
        sequence.output += [drawn.token for drawn in result.drawn]
