"""Everything that the master key wraps in the database: tenants' data keys, webhooks' secrets, upstreams' credentials."""

from __future__ import annotations

from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database import sealing
from accounting.events import webhooks
from accounting.upstreams import upstreams

FOREIGN = (
    "This home's master.key is not the one with which this database was written: copy secrets/ from another host or the"
    " backup."
)
_KINDS = (sealing, webhooks, upstreams)


async def fits(conn: AsyncConnection, master: bytes) -> bool:
    """Says whether this master key opens what the database has. One of each kind is tried, because they change together.
    Any key fits a database that has none of them yet."""
    return False not in [await kind.is_wrapped(conn, master) for kind in _KINDS]


async def is_foreign(conn: AsyncConnection, master: bytes) -> bool:
    """Says whether this master key opens nothing of what the database has. One damaged value makes no key foreign."""
    found = {await kind.is_wrapped(conn, master) for kind in _KINDS}
    return False in found and True not in found


async def rewrap(conn: AsyncConnection, old: bytes, new: bytes) -> int:
    """Wraps everything with another master key. Returns how many there are. Raises `SealBroken`."""
    return sum([await kind.rewrap(conn, old, new) for kind in _KINDS])
