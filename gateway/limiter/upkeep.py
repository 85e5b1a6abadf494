"""The background work of a gateway for the limiter. Each second it follows incidents and repeats endings. Less often it
moves expiries and ends reservations that an earlier process of its slot left open. The journal is replayed and shipped
before this begins.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from accounting.database import auth_epoch
from accounting.database.db import Database
from accounting.limits import budgets, limiter_books
from gateway.base.redis_link import LimiterUnavailable, RedisLink
from gateway.limiter.limits import Limiter
from gateway.limiter.redis_keys import open_key, reservation_key, tenant_of
from gateway.limiter.rules import LimitSubject
from workers.process.rounds import restarted, within

log = logging.getLogger(__name__)

EVERY_S = 1.0
CLOSE_S = 2.0
TOUCH_EVERY_S = 15.0
SUSPECTS_EVERY_S = 30.0


class Upkeep:
    """A background task. `start()` begins it and `close()` ends it."""

    def __init__(self, limiter: Limiter, link: RedisLink, database: Database) -> None:
        self._limiter = limiter
        self._link = link
        self._database = database
        self._task: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

    async def start(self) -> None:
        """Gives back what an earlier process of this slot left open. It does not wait for Redis or SQL: reservations
        that are left become suspect, and are found later.
        """
        try:
            await self._limiter.incidents.follow()
            await self.release_orphans("+inf")  # nothing is held yet
        except (LimiterUnavailable, SQLAlchemyError, OSError) as reason:
            log.warning("reservations of an earlier process are not given back yet: %s", reason)
        self._limiter.rebuilder.keep_claims()
        self._task = asyncio.create_task(restarted(self._run))

    async def close(self) -> None:
        """Ends the task. A transaction under way is not cut off, unless it takes too long."""
        self._stop.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=CLOSE_S)
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._limiter.rebuilder.leave()

    async def release_orphans(self, until_ms: str) -> None:
        """Ends this slot's reservations that expire before `until_ms` and that this process does not hold.

        While requests are admitted, only suspect reservations may be looked for: one that is being reserved right now
        is not held yet.
        """
        cursor = 0
        while True:
            answer = await self._link.command("SCAN", cursor, "MATCH", open_key("*"), "COUNT", 1000)
            for name in answer[1]:
                await self._end_orphans(tenant_of(name.decode()), until_ms)
            cursor = int(answer[0])
            if cursor == 0:
                return

    async def refresh_budgets(self) -> None:
        """Reads the budgets of tenants with running requests, if anything changed, so that a lowered limit binds their
        next lease.
        """
        fresh, tenants = self._limiter.fresh, self._limiter.open_reservations.tenants
        if not tenants:
            fresh.by_tenant = {}
            return
        async with self._database.read() as conn:
            version = await auth_epoch.auth_epoch(conn)
            if version == fresh.version and tenants <= fresh.by_tenant.keys():
                return
            found = await budgets.of_tenants(conn, tenants)
        fresh.by_tenant = {tenant_id: tuple(found.get(tenant_id, ())) for tenant_id in tenants}
        fresh.version = version

    async def _run(self) -> None:
        now = time.monotonic()
        touch_at, suspects_at = now + TOUCH_EVERY_S, now + SUSPECTS_EVERY_S
        while not await within(self._stop, EVERY_S):
            await _done(self._limiter.incidents.follow())
            await _done(self.refresh_budgets())
            await _done(self._pay())
            now = time.monotonic()
            if now >= touch_at and await _done(self._limiter.touch()):
                touch_at = now + TOUCH_EVERY_S
            if now >= suspects_at and await _done(self._release_suspects()):
                suspects_at = now + SUSPECTS_EVERY_S

    async def _pay(self) -> None:
        for request_id in list(self._limiter.open_reservations.owed):
            if not self._link.is_open:
                return
            await self._limiter.pay(request_id)

    async def _release_suspects(self) -> None:
        await self.release_orphans(await self._redis_ms())

    async def _end_orphans(self, tenant_id: str, until: str) -> None:
        """Ends orphans as the ledger ended them. A request that the ledger does not know was never opened."""
        left: dict[str, LimitSubject] = {}
        for member in await self._link.command("ZRANGEBYSCORE", open_key(tenant_id), "-inf", until):
            holder = await self._orphan(tenant_id, member.decode())
            if holder is not None:
                left[holder.request_id] = holder
        if not left:
            return
        async with self._database.read() as conn:
            ended = await limiter_books.endings(conn, left)
        for request_id, holder in left.items():
            if (ending := ended.get(request_id)) is None:
                await self._limiter.release(holder)
            else:
                await self._limiter.settle(holder, ending.charge, ending.input, ending.output)

    async def _orphan(self, tenant_id: str, request_id: str) -> LimitSubject | None:
        """Returns the orphan, or None if another slot's or held here."""
        open_reservations = self._limiter.open_reservations
        slot, windows = await self._link.command("HMGET", reservation_key(tenant_id, request_id), "slot", "w")
        known = request_id in open_reservations.held or request_id in open_reservations.owed
        if known or slot != str(open_reservations.slot).encode() or windows is None:
            return None
        return LimitSubject(request_id, tenant_id, "", counted_in=tuple(windows.decode().split()))

    async def _redis_ms(self) -> str:
        seconds, microseconds = await self._link.command("TIME")
        return str(int(seconds) * 1000 + int(microseconds) // 1000)


async def _done(step: Coroutine[Any, Any, None]) -> bool:
    """Does one step of a round. Returns False if Redis or SQL does not answer; the next round tries again."""
    try:
        await step
    except (LimiterUnavailable, SQLAlchemyError, OSError):
        return False
    return True
