"""Where workers leave KV for each other: what any store of it can do. Real: `directory`, `redis_store`.

Knows tags and bytes: a region's tag and a name say where a value lies, an owner's tag which regions to drop with a tenant.
All three are keyed hashes. Nothing here is trusted: whoever reads a value opens it with `value.unseal`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class StoreAway(Exception):
    """The store does not answer, or does not take what it is given."""


@dataclass(frozen=True, slots=True)
class Bounds:
    num_bytes: int
    """Of all values together; the oldest go first."""
    ttl_s: int
    """Since a value was written."""


class Store(Protocol):
    """Every call may take long and may raise `StoreAway`."""

    def get(self, region: str, name: str) -> bytes | None: ...

    def put(self, owner: str, region: str, name: str, value: bytes) -> None: ...

    def drop_region(self, region: str) -> None: ...

    def drop_owner(self, owner: str) -> None:
        """Every region in which this owner wrote."""
        ...

    def close(self) -> None: ...
