"""Schedules of rows for a runner that keeps device rows: what the engine does with them, without its reasons."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from workers.engine.device.runner import ModelRunner
from workers.engine.values.plan import PENDING, Row, SampledToken, SampleSpec, Ticket
from workers.protocol.messages import SamplingParams

MAX_ROWS = 6
NUM_TOKENS = 14

PARAMS = (
    SamplingParams(seed=0, temperature=0.0, min_tokens=99),
    SamplingParams(seed=5, temperature=0.9, top_p=0.9, top_k=40, min_tokens=99),
    # Below 0 it asks for the last token again, so one that is not counted shows.
    SamplingParams(seed=6, repetition_penalty=1.1, presence_penalty=-6.0, ignore_eos=True),
    SamplingParams(seed=7, temperature=0.7, min_p=0.02, logprobs=3, ignore_eos=True),
    SamplingParams(seed=8, temperature=0.0, logit_bias=((9, 4.0), (70, -3.0)), logprobs=0),
)


@dataclass(eq=False)
class Running:
    """A sequence as the engine holds it: what is collected, what is in flight."""

    prompt: list[int]
    params: SamplingParams
    arrival: int
    row_id: int = -1
    table: list[int] = field(default_factory=list)
    num_written: int = 0
    pending: bool = False
    output: list[int] = field(default_factory=list)
    drawn: list[SampledToken] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def num_drawn(self) -> int:
        return len(self.output) + self.pending


class LaggedEngine:
    """Does with rows what the real engine does, without its reasons: random chunks, pauses, preemptions, other blocks
    under a running sequence. With `lag` a step is collected only behind the launch of the next one."""

    def __init__(
        self, runner: ModelRunner, sequences: Sequence[Running], seed: int, lag: int, num_tokens: int = NUM_TOKENS
    ) -> None:
        self._num_tokens = num_tokens
        self._runner, self._sequences, self._lag = runner, sequences, lag
        self._random = random.Random(seed)
        self._free = list(range(1, runner.num_blocks))
        self._random.shuffle(self._free)
        self._row_ids = list(range(MAX_ROWS))
        self._random.shuffle(self._row_ids)
        self._flying: tuple[Ticket, list[Running]] | None = None
        with torch.inference_mode():
            poisoned = runner.store.tensor if runner.store.scales is None else runner.store.scales
            poisoned.fill_(float("nan"))

    def run(self) -> None:
        for number in itertools.count():
            open_ = [s for s in self._sequences if len(s.output) < self._num_tokens]
            if not open_ and self._flying is None:
                return
            chosen = [
                s
                for s in open_
                if s.arrival <= number and s.num_drawn < self._num_tokens and self._random.random() < 0.9
            ]
            self._step([s for s in chosen if self._seated(s)])

    def _seated(self, sequence: Running) -> bool:
        if sequence.row_id < 0:
            if not self._row_ids:
                return False
            sequence.row_id = self._row_ids.pop()
        return True

    def _step(self, chosen: list[Running]) -> None:
        self._disturb(chosen)
        rows = [self._row(sequence) for sequence in chosen]
        launched = None
        if rows:
            if pairs := self._moves(chosen):
                self._runner.copy_blocks(pairs)
                rows = [self._row(sequence) for sequence in chosen]
            launched = (self._runner.launch(rows), chosen)
            for sequence, row in zip(chosen, rows, strict=True):
                sequence.num_written += len(row.tokens)
                sequence.pending = bool(row.draws)
        if self._lag:
            launched, self._flying = self._flying, launched
        if launched is not None:
            self._collect(*launched)

    def _row(self, sequence: Running) -> Row:
        start = sequence.num_written
        if sequence.pending and start == len(sequence.tokens):
            tokens, end = [PENDING], start + 1
        else:
            end = min(len(sequence.tokens), start + self._chunk(sequence))
            tokens = sequence.tokens[start:end]
        size = self._runner.block_size
        while len(sequence.table) * size < end:
            sequence.table.append(self._free.pop())
        draws = ()
        if end == len(sequence.tokens) + (tokens == [PENDING]):
            params, output = sequence.params, list(sequence.output)
            draws = (SampleSpec(params, params.seed, end, sequence.prompt, output),)
        return Row(tokens, start, sequence.table, draws, row_id=sequence.row_id)

    def _chunk(self, sequence: Running) -> int:
        """The same however often it is asked in a step."""
        return random.Random(f"{sequence.params.seed}/{sequence.num_written}").choice((1, 3, 50))

    def _disturb(self, chosen: list[Running]) -> None:
        """Now and then a sequence that is not in flight loses all it has."""
        for sequence in list(chosen):
            if not sequence.pending and sequence.output and self._random.random() < 0.08:
                self._leave(sequence)
                sequence.num_written = 0
                chosen.remove(sequence)

    def _moves(self, chosen: list[Running]) -> list[tuple[int, int]]:
        """A full block of a running sequence is found elsewhere: its table becomes another list."""
        pairs = []
        for sequence in chosen:
            full = sequence.num_written // self._runner.block_size
            if full and self._random.random() < 0.15:
                place, new = self._random.randrange(full), self._free.pop(0)
                table = list(sequence.table)
                pairs.append((table[place], new))
                self._free.append(table[place])
                table[place] = new
                sequence.table = table
        return pairs

    def _collect(self, ticket: Ticket, sequences: list[Running]) -> None:
        for sequence, result in zip(sequences, ticket.collect(), strict=True):
            if not result.drawn:
                continue
            (drawn,) = result.drawn
            sequence.drawn.append(drawn)
            sequence.output.append(drawn.token)
            still_in_flight = self._flying is not None and sequence in self._flying[1]
            sequence.pending = still_in_flight
            if len(sequence.output) == self._num_tokens:
                self._leave(sequence)

    def _leave(self, sequence: Running) -> None:
        self._row_ids.append(sequence.row_id)
        self._free += sequence.table
        sequence.row_id, sequence.table = -1, []


def sequences_of(number: int) -> list[Running]:
    return [
        Running(
            random.Random(100 + i).choices(range(3, 301), k=5 + 4 * i),
            msgspec.structs.replace(PARAMS[i % len(PARAMS)], seed=i),
            arrival=2 * (i // 2),
        )
        for i in range(number)
    ]
