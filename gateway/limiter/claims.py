"""Claims to build limiter states: of each tenant, one state is built under each epoch, by one gateway (metering.md 6.5).

Redis takes a claim and SQL keeps it. So nobody who asks for a first state waits for SQL's writer, and a claim outlives
what Redis loses: a state that is gone although it was claimed is an incident. A claim is in Redis until it is in SQL,
whoever brings it there. Redis loses claims only together with its data life, which is an incident of all tenants.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping

from sqlalchemy.exc import SQLAlchemyError

from accounting.database.db import Database
from accounting.limits import limiter_state
from accounting.values import clock
from gateway.base.redis_link import LimiterUnavailable, RedisLink
from gateway.limiter.redis_keys import CLAIMS_KEY
from workers.process.rounds import restarted, within

log = logging.getLogger(__name__)

PAUSE_S = 0.25
"""The wait for more claims before a transaction, which takes as long for one as for many."""
RETRY_S = 1.0
CLOSE_S = 2.0
CHUNK = 500
"""Claims in one transaction of SQL."""


class Claims:
    """The claims of one gateway. `close()` must be awaited."""

    def __init__(self, link: RedisLink, database: Database, slot: int) -> None:
        self._link = link
        self._database = database
        self._slot = slot
        self._keeping: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def take(self, epochs: Mapping[str, int]) -> dict[str, int]:
        """Claims tenants. Returns those that nobody else has claimed in Redis. What SQL keeps has to be read after
        this, because a claim leaves Redis once it is in SQL. Raises LimiterUnavailable.
        """
        if not epochs:
            return {}
        mine, names = secrets.token_hex(8), [f"{tenant_id}@{epoch}" for tenant_id, epoch in epochs.items()]
        *_, holders = await asyncio.gather(
            *(self._link.command("HSETNX", CLAIMS_KEY, name, mine) for name in names),
            self._link.command("HMGET", CLAIMS_KEY, *names),  # a repeated HSETNX does not tell whose it was
        )
        return {
            tenant_id: epoch
            for (tenant_id, epoch), holder in zip(epochs.items(), holders, strict=True)
            if holder == mine.encode()
        }

    def keep(self) -> None:
        """Begins to bring the claims in Redis into SQL, those of gateways that were killed included."""
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(restarted(self._keep))

    async def close(self) -> None:
        """Brings what is in Redis into SQL at once, and ends. A transaction under way is not cut off, unless it takes
        too long.
        """
        self._closing.set()
        if self._keeping is not None:
            await asyncio.wait([self._keeping], timeout=CLOSE_S)
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def _keep(self) -> None:
        while True:
            await within(self._closing, PAUSE_S)
            try:
                names = await self._link.command("HKEYS", CLAIMS_KEY)
                if not names:
                    return
                for start in range(0, len(names), CHUNK):
                    await self._keep_some(names[start : start + CHUNK])
            except (LimiterUnavailable, SQLAlchemyError, OSError) as reason:
                log.info("claims of limiter states are not in SQL yet: %s", reason)
                if await within(self._closing, RETRY_S):
                    return

    async def _keep_some(self, names: list[bytes]) -> None:
        claims = [name.decode().rpartition("@") for name in names]
        async with self._database.write() as conn:
            pairs = [(tenant_id, int(epoch)) for tenant_id, _, epoch in claims]
            await limiter_state.keep_claims(conn, pairs, self._slot, clock.now_ms())
        await self._link.command("HDEL", CLAIMS_KEY, *names)
