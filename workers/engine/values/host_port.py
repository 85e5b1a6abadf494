"""The border between whoever decides which blocks are copied to host memory and back, and whoever moves the bytes.

Slots of host memory are integers here, as blocks are. Real: `offload.HostStore`; in tests: a scripted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Pairs = Sequence[tuple[int, int]]


class Transfer(Protocol):
    """Bytes on their way."""

    @property
    def done(self) -> bool: ...

    @property
    def seconds(self) -> float:
        """What it took, once it is done; 0: nobody knows."""
        ...

    def wait(self) -> None: ...


class HostBlocks(Protocol):
    """Transfers keep the order in which they were asked for, also where they touch the same slot. Each of the three
    may raise `DeviceOutOfMemory`; then nothing was moved."""

    num_slots: int
    bytes_per_slot: int
    layout: str
    """How a block's numbers lie in it: bytes of two stores mean the same if this is equal."""

    def store(self, pairs: Pairs) -> Transfer:
        """Copies (block, slot) as the blocks are behind all launched steps and before the next one."""
        ...

    def load(self, slots: Sequence[int]) -> Transfer:
        """Brings these slots to the device, beside whatever runs there."""
        ...

    def place(self, loaded: Transfer, blocks: Sequence[int]) -> None:
        """Puts what a load that is done brought into blocks, in its order: behind all launched steps and before the
        next one."""
        ...

    def read(self, slot: int) -> bytes:
        """What was stored there. From any thread, while the slot is nobody else's."""
        ...

    def write(self, slot: int, data: bytes | memoryview) -> None:
        """To a slot that nothing reads."""
        ...
