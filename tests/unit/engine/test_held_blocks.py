"""Blocks of an attempt are counted once, at a cost that does not grow with the number of its choices."""

from __future__ import annotations

import random

import pytest
from engine_driver import Driver
from fakes import ScriptedRunner, generate_request

from workers.engine.sequences.held_blocks import HeldBlocks
from workers.engine.sequences.sequence import Sequence


@pytest.mark.parametrize("seed", range(30))
def test_the_number_is_that_of_the_blocks_in_all_tables(seed):
    """Tables come, fork, grow, have a block replaced, and leave, as those of choices do."""
    draw, held, fresh = random.Random(seed), HeldBlocks(), iter(range(1000, 9000))
    tables = {}

    def new():
        """A table that shares the beginning of another one."""
        known = draw.choice([*(table for table, _ in tables.values()), []])
        return [*known[: draw.randint(0, len(known))], *(next(fresh) for _ in range(draw.randint(1, 5)))]

    for number in range(400):
        kind = draw.choice(("add", "fork", "append", "replace", "remove", "change", "apart"))
        if kind == "add" or not tables:
            table = new()
            tables[number] = (table, held.add(table))
            continue
        name = draw.choice(list(tables))
        table, leading = tables[name]
        if kind == "fork":
            tables[number] = (list(table), held.fork(table, leading))
        elif kind == "append":
            table.append(next(fresh))
            held.append(table[-1])
        elif kind == "replace":
            block = next(fresh)
            leading = held.replace(table, leading, len(table) - 1, block)
            tables[name] = ([*table[:-1], block], leading)
        else:
            held.remove(table, leading)
            del tables[name]
            if kind == "change":
                table = new()
                tables[name] = (table, held.add(table))
            elif kind == "apart":
                table = [next(fresh) for _ in table]
                tables[name] = (table, held.fork(table))
        assert held.number == len({block for table, _ in tables.values() for block in table})
    for table, leading in tables.values():
        held.remove(table, leading)
    assert held.number == 0


@pytest.mark.parametrize("num_choices", [8, 64])
def test_choices_do_not_look_at_each_others_tables_when_they_end(num_choices, monkeypatch):
    drive = Driver(ScriptedRunner(num_blocks=2000, block_size=4), max_running=64, max_batch_tokens=256)
    drive.send(generate_request("r", [7] * 30, 40, num_choices=num_choices, temperature=1.0))
    for _ in range(38):
        drive.step()
    reads, table = [], Sequence.__dict__["block_ids"]

    def read(sequence):
        reads.append(sequence)
        return table.__get__(sequence, Sequence)

    monkeypatch.setattr(Sequence, "block_ids", property(read, table.__set__))
    sequences = drive.attempt("r").sequences
    assert len(sequences) == num_choices
    for sequence in tuple(sequences):
        drive.scheduler.end(sequence)
    assert len(reads) <= 8 * num_choices
