"""Messages between rank 0 and the other ranks: frames on one socket pair per rank.

It knows plan.py's rows; a draw is sent only as a flag, because only rank 0 draws. It loads no torch. A socket reports
at once that its other end is dead, and waits for work without a time limit; a collective does neither.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec

from workers.engine.values.layout import Tree
from workers.engine.values.plan import Row, SampleSpec
from workers.protocol.frames import Frames
from workers.protocol.messages import SamplingParams

_ELSEWHERE = (SampleSpec(SamplingParams(0), 0, 0, (), ()),)
"""The draws of a row on a rank that does not draw: only the head has to be computed."""


class RowPart(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a row that a forward pass needs."""

    tokens: list[int]
    start: int
    block_table: list[int]
    draws: bool
    prompt_logprobs: int
    next_token: int
    row_id: int
    num_proposed: int
    parents: tuple[int, ...]


class Execute(msgspec.Struct, frozen=True, array_like=True, tag=0):
    rows: list[RowPart]


class CopyBlocks(msgspec.Struct, frozen=True, array_like=True, tag=1):
    pairs: list[tuple[int, int]]


class Leave(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The last message of rank 0."""


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A message of a rank whose model is ready."""


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The last message of a rank: why it ends, and the exit status it proposes for the worker."""

    sentence: str
    status: int


class MoveTokens(msgspec.Struct, frozen=True, array_like=True, tag=5):
    moves: list[tuple[int, int]]


Said = Execute | CopyBlocks | MoveTokens | Leave | Loaded | Ended
_SAID: Frames[Said] = Frames(Said)
frame = _SAID.encode


class Channel:
    """One end of a socket pair. Calls block; one thread sends and one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, frame: bytes) -> None:
        """Raises `OSError` if the other end is dead."""
        self._socket.sendall(frame)

    def receive(self) -> Said | None:
        """Returns the next message, or None if the other end is closed."""
        return _SAID.read(self._read)

    def close(self) -> None:
        self._socket.close()

    def _read(self, num_bytes: int) -> bytearray:
        """Returns nothing at the end."""
        buffer = bytearray(num_bytes)
        view = memoryview(buffer)
        while view:
            try:
                num_read = self._socket.recv_into(view)
            except ConnectionResetError:
                num_read = 0
            if num_read == 0:
                return bytearray()
            view = view[num_read:]
        return buffer


def parts_of(rows: Sequence[Row], block_size: int) -> list[RowPart]:
    """Returns the parts of rows that are sent; of block tables only the blocks that the rows reach."""
    return [
        RowPart(
            list(row.tokens),
            row.start,
            list(row.block_table[: -(-(row.start + len(row.tokens)) // block_size)]),
            bool(row.draws),
            row.prompt_logprobs,
            row.next_token,
            row.row_id,
            row.num_proposed,
            row.layout.parents if isinstance(row.layout, Tree) else (),
        )
        for row in rows
    ]


def rows_of(parts: Sequence[RowPart]) -> list[Row]:
    """Returns rows that run as the original ones do, up to the logits."""
    return [
        Row(
            part.tokens,
            part.start,
            part.block_table,
            _ELSEWHERE * (1 + part.num_proposed) if part.draws else (),
            part.prompt_logprobs,
            part.next_token,
            part.row_id,
            num_proposed=part.num_proposed,
            layout=Tree(part.parents) if part.parents else None,
        )
        for part in parts
    ]
