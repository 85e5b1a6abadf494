"""State of running sequences on the device: last token, position, block table and sampling numbers, one row each.

It knows plan.py's rows and device rows. It does not know the model, nor how a step is run. The host keeps a mirror and
sends only what differs from it: rows that joined, and block ids that were added or changed. A row that ends with
PENDING continues from the mirror, one token further; any other row is sent whole.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from kernels.arguments.batch import DeviceRows
from kernels.arguments.draws import DrawTensors
from workers.engine.values.layout import Thinned
from workers.engine.values.plan import PENDING, Row, SampleSpec
from workers.protocol.messages import SamplingParams

_NOBODYS = SampleSpec(SamplingParams(seed=0), 0, 0, (), ())


class Field(IntEnum):
    """Lines of the state matrix, `[len(Field), max_rows]` int32; floats lie there bit by bit."""

    LAST_TOKEN = 0
    POSITION = 1
    """Position of the last token; the next step writes its KV."""
    TEMPERATURE = 2
    TOP_P = 3
    MIN_P = 4
    TOP_K = 5
    SEED_LOW = 6
    SEED_HIGH = 7


@dataclass(slots=True)
class _Known:
    """The contents of one device row."""

    position: int
    blocks: array[int]
    source: Sequence[int]
    """The list the blocks were read from; it is only compared by identity."""


@dataclass(slots=True)
class Delta:
    """The changes that the device needs before a step, as integers."""

    rows: array[int] = field(default_factory=lambda: array("i"))
    records: array[int] = field(default_factory=lambda: array("i"))
    """The fields of each row of `rows`, in the order of `Field`."""
    places: array[int] = field(default_factory=lambda: array("i"))
    """Row id * max_blocks + index in the row's block table."""
    blocks: array[int] = field(default_factory=lambda: array("i"))
    """The block id for each entry of `places`."""
    known: dict[int, _Known] = field(default_factory=dict)

    def parts(self) -> tuple[array[int], ...]:
        return self.rows, self.records, self.places, self.blocks


class Mirror:
    """The host's copy of the device rows. It does no input or output: `diff` returns what to send, `commit` notes that
    it was sent, and `advance` notes that tokens were drawn. A step that fails between `diff` and `commit` leaves the
    mirror unchanged."""

    def __init__(self, max_rows: int, max_blocks: int) -> None:
        self.max_rows = max_rows
        self.max_blocks = max_blocks
        self._known: dict[int, _Known] = {}

    def diff(self, rows: Sequence[Row]) -> Delta:
        delta = Delta()
        for row in rows:
            assert 0 <= row.row_id < self.max_rows, f"device row {row.row_id}"
            assert not isinstance(row.layout, Thinned), "device rows see everything"
            known = self._known.get(row.row_id)
            position = row.start + len(row.tokens) - 1
            if row.tokens[-1] == PENDING:
                assert known is not None and known.position == position, "a pending token of nobody"
                assert len(row.tokens) == 1, "a pending token stands alone"
                if known.source is row.block_table and len(known.blocks) == len(row.block_table):
                    continue
            else:
                delta.rows.append(row.row_id)
                delta.records += _record(row, position)
            delta.known[row.row_id] = self._told(delta, row, known, position)
        return delta

    def _told(self, delta: Delta, row: Row, known: _Known | None, position: int) -> _Known:
        """Adds the blocks that differ to the delta."""
        table, size = row.block_table, len(row.block_table)
        assert size <= self.max_blocks, f"{size} blocks in a table of {self.max_blocks}"
        old = array("i") if known is None else known.blocks
        same_list = known is not None and known.source is table and row.tokens[-1] == PENDING
        first = len(old) if same_list else _common(old, table)
        fresh = array("i", table[first:])
        base = row.row_id * self.max_blocks
        delta.places.extend(range(base + first, base + size))
        delta.blocks += fresh
        return _Known(position, old[:first] + fresh, table)

    def commit(self, delta: Delta) -> None:
        self._known.update(delta.known)

    def advance(self, row_ids: Sequence[int]) -> None:
        """Notes that each of the rows has one more token on the device."""
        for row_id in row_ids:
            self._known[row_id].position += 1


class RowStore:
    """The tensors that hold the rows on the device."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.state = torch.zeros((len(Field), max_rows), dtype=torch.int32, device=device)
        self.block_table = torch.zeros((max_rows, max_blocks), dtype=torch.int32, device=device)
        self.rows = DeviceRows(self.state[Field.LAST_TOKEN], self.state[Field.POSITION], self.block_table)

    def clear(self) -> None:
        self.state.zero_()
        self.block_table.zero_()

    def apply(self, rows: torch.Tensor, records: torch.Tensor, places: torch.Tensor, blocks: torch.Tensor) -> None:
        """Writes the parts of a delta, which are on the device, into the tensors."""
        if len(rows):
            self.state.index_copy_(1, rows.long(), records.view(-1, len(Field)).T)
        if len(places):
            self.block_table.view(-1).index_copy_(0, places.long(), blocks)


_NUMBERS = struct.Struct("=fffiII")


def numbers(draw: SampleSpec) -> array[int]:
    """Returns the sampling numbers of a draw, in the order of `Field`."""
    params, seed = draw.params, draw.seed
    line = array("i")
    line.frombytes(
        _NUMBERS.pack(
            params.temperature, params.top_p, params.min_p, min(params.top_k, 0x7FFFFFFF), seed & 0xFFFFFFFF, seed >> 32
        )
    )
    return line


def draw_tensors(lines: torch.Tensor, positions: torch.Tensor) -> DrawTensors:
    """Returns the draws as tensors. `lines` is `[6, n]` int32, the sampling numbers of n draws; `positions` int64 are
    those of the tokens to be drawn."""
    temperature, top_p, min_p = lines[:3].view(torch.float32).unbind()
    top_k, *words = lines[3:].to(torch.int64).unbind()
    seeds = torch.stack(words, dim=1) & 0xFFFFFFFF
    return DrawTensors(temperature, top_k, top_p, min_p, seeds, positions)


def _record(row: Row, position: int) -> array[int]:
    """Returns the fields of a row. A row with several draws gets placeholder sampling numbers: its draws are passed
    separately, and its next step sends the whole row again."""
    draw = row.draws[0] if len(row.draws) == 1 else _NOBODYS
    return array("i", (row.tokens[-1], position)) + numbers(draw)


def _common(old: array[int], table: Sequence[int]) -> int:
    """Returns the length of the common beginning."""
    number = min(len(old), len(table))
    if old[:number] == array("i", table[:number]):
        return number
    return next(index for index in range(number) if old[index] != table[index])
