"""The interface of a store in which workers share KV. The implementations are `directory` and `redis_store`.

It knows tags and bytes. A region's tag and a name say where a value is, and an owner's tag says which regions to drop
with a tenant. All three are keyed hashes. Nothing in a store is trusted: a reader opens each value with `value.unseal`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class StoreAway(Exception):
    """The store does not answer, or does not accept a value."""


@dataclass(frozen=True, slots=True)
class Bounds:
    num_bytes: int
    """Largest number of bytes of all values together. The oldest values are deleted first."""
    ttl_s: int
    """Seconds that a value is kept after it was written."""


class Store(Protocol):
    """A store of values. Every call may take long and may raise `StoreAway`."""

    def get(self, region: str, name: str) -> bytes | None: ...

    def put(self, owner: str, region: str, name: str, value: bytes) -> None: ...

    def drop_owner(self, owner: str) -> None:
        """Drops every region in which this owner wrote."""
        ...

    def close(self) -> None: ...
