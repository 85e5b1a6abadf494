"""Interface between the code that decides which blocks are copied to host memory and back, and the code that moves the
bytes.

Slots of host memory are integers here, as blocks are. The real implementation is `kv.offload.HostStore`; tests use a
scripted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Pairs = Sequence[tuple[int, int]]


class Transfer(Protocol):
    """A copy in progress."""

    @property
    def done(self) -> bool: ...

    @property
    def seconds(self) -> float:
        """Seconds that the copy took, once it is done. The value is 0 if nobody measured it."""
        ...

    def wait(self) -> None: ...


class HostBlocks(Protocol):
    """Copies of blocks between the device and host memory. Transfers keep the order in which they were asked for, also
    where they touch the same slot. Each of `store`, `load` and `place` may raise `DeviceOutOfMemory`; then a load or place
    has moved nothing, and some slots of a store may hold their blocks and others what they held."""

    num_slots: int
    bytes_per_slot: int
    layout: str
    """Description of how a block's numbers lie in it. Bytes of two stores mean the same if their layouts are equal."""

    def store(self, pairs: Pairs) -> Transfer:
        """Copies each (block, slot) pair. The blocks are copied as they are after all launched steps and before the
        next one."""
        ...

    def load(self, slots: Sequence[int]) -> Transfer:
        """Copies these slots to the device while other work runs there."""
        ...

    def place(self, loaded: Transfer, blocks: Sequence[int]) -> None:
        """Writes the contents of a finished load into `blocks`, in the load's order. This happens after all launched
        steps and before the next one."""
        ...

    def read(self, slot: int) -> bytes:
        """Returns the bytes that were stored in the slot. Any thread may call this while nobody else uses the slot."""
        ...

    def write(self, slot: int, data: bytes | memoryview) -> None:
        """Writes bytes to a slot that nobody reads meanwhile."""
        ...
