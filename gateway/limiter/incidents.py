"""Learns of losses of limiter state, and lists for each what this gateway holds (metering.md 6.5).

Every loss is an incident with an epoch, one number for all gateways. Once a gateway knows the epoch, it ships its endings
to SQL and lists its open requests. To learn of an epoch only reads SQL. To list waits for SQL's writer, so nobody waits
for a list who does not need it. The module builds no state (`rebuild.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import Database
from accounting.limits import limiter_state
from accounting.limits.limiter_books import CLOCKS_APART_MS
from accounting.limits.limiter_state import Incident
from accounting.values import clock
from gateway.base.redis_link import BooksUnavailable, LimiterUnavailable, RedisLink
from gateway.limiter.open_reservations import OpenReservations

log = logging.getLogger(__name__)

DEAD_MS = 3_000
"""A gateway that has not listed by then counts as dead."""
LOOK_S = 0.05
NAMED = 5


@dataclass
class Epochs:
    """The epochs in force, as far as this gateway knows."""

    last: int = 0
    newest: Incident | None = None
    """The incident of `last`."""
    of_all: int = 0
    of_one: dict[str, int] = field(default_factory=dict)
    raised_at_ms: dict[int, int] = field(default_factory=dict)
    noted_at: dict[int, float] = field(default_factory=dict)
    """The time at which this gateway learned of each epoch. The gateway that raised it may have another clock."""

    def of(self, tenant_id: str) -> int:
        return max(self.of_all, self.of_one.get(tenant_id, 0))

    def note(self, incident: Incident) -> None:
        self.last, self.newest = incident.epoch, incident
        self.raised_at_ms[incident.epoch] = incident.raised_at_ms
        self.noted_at[incident.epoch] = time.monotonic()
        if incident.tenant_id is not None:
            self.of_one[incident.tenant_id] = incident.epoch
            return
        self.of_all = incident.epoch
        self.of_one.clear()
        self.raised_at_ms = {incident.epoch: incident.raised_at_ms}
        self.noted_at = {incident.epoch: self.noted_at[incident.epoch]}

    def forget(self, settled: int) -> None:
        """Removes the times of epochs that need no list any more. There is an epoch for each charge that was taken back."""
        for times in (self.raised_at_ms, self.noted_at):
            for epoch in [epoch for epoch in times if epoch <= settled]:
                del times[epoch]

    def is_over(self, epoch: int) -> bool:
        """Returns True once gateways that have not listed for this epoch count as dead."""
        late_ms = clock.now_ms() - self.raised_at_ms.get(epoch, 0)
        known_s = time.monotonic() - self.noted_at.get(epoch, 0.0)
        return late_ms > DEAD_MS + CLOCKS_APART_MS or known_s * 1000 > DEAD_MS


class Incidents:
    """The incidents in force for one gateway. Call `join()` before the first request, and `leave()` when no reservation
    is open any more.
    """

    def __init__(
        self,
        link: RedisLink,
        database: Database,
        open_reservations: OpenReservations,
        caught_up: Callable[[], Awaitable[None]],
    ) -> None:
        """`caught_up` returns when every ending that is durable now is in SQL."""
        self._link = link
        self._database = database
        self._open_reservations = open_reservations
        self._caught_up = caught_up
        self._epochs = Epochs()
        self._life = ""
        self._listed = -1
        """The epoch for which this gateway has listed what it holds."""
        self._settled = -1
        """The newest epoch that needs no list any more: every gateway has listed for it, or counts as dead."""
        self._version: int | None = None
        """The version of the database in which incidents were last read."""
        self._noticing = asyncio.Lock()
        self._learning = asyncio.Lock()
        self._listing = asyncio.Lock()

    async def join(self) -> None:
        """Registers this slot. Raises LimiterUnavailable."""
        if self._listed >= 0:
            return
        await self._caught_up()
        async with writing(self._database) as conn:
            self._listed = await limiter_state.join(conn, self._open_reservations.slot, clock.now_ms())

    async def leave(self) -> None:
        try:
            async with writing(self._database) as conn:
                await limiter_state.leave(conn, self._open_reservations.slot)
        except LimiterUnavailable as reason:
            log.warning("a rebuild of the limiter will wait for this gateway: %s", reason)

    async def epoch(self, tenant_id: str) -> int:
        """Returns the tenant's epoch. There is a round trip only after a loss. Raises LimiterUnavailable."""
        if not self.is_current:
            async with self._noticing:
                if not self.is_current:
                    await self.follow()
        return self._epochs.of(tenant_id)

    def is_in_force(self, tenant_id: str, epoch: int) -> bool:
        return self._link.life == self._life and self._epochs.of(tenant_id) == epoch

    def is_settled(self, tenant_id: str) -> bool:
        """Says whether all lists that the tenant's state is built from are in SQL, as far as this gateway knows."""
        return self._epochs.of(tenant_id) <= min(self._settled, self._listed)

    async def learn(self) -> None:
        """Notices losses here or elsewhere. It waits for no writer of SQL, unless Redis' data is new. Raises
        LimiterUnavailable.
        """
        async with self._learning:
            await self.join()
            life = await self._link.refresh_life()
            if life != self._life:
                async with writing(self._database) as conn:
                    await limiter_state.raise_for_life(conn, life, clock.now_ms())
            version = self._database.data_version()
            if version is None or version != self._version:
                for incident in await self._later():
                    self._epochs.note(incident)
                self._version = version
            self._life = life

    async def _later(self) -> list[Incident]:
        """Returns the incidents after the last known one. If SQL has lost that one, as a failover may do, its number can
        mean another tenant's, so everything is built again.
        """
        newest = self._epochs.newest
        async with reading(self._database) as conn:
            found = await limiter_state.incidents(conn, self._epochs.last)
        if newest is None or newest in found:
            return [incident for incident in found if incident != newest]
        log.warning("SQL has lost the limiter's incident %d, so every tenant's state is built again", newest.epoch)
        async with writing(self._database) as conn:
            await limiter_state.raise_for_all(conn, clock.now_ms(), above=newest.epoch)
            return await limiter_state.incidents(conn, newest.epoch + 1)

    async def follow(self) -> None:
        """Notices losses here or elsewhere, and lists what this gateway holds. Raises LimiterUnavailable."""
        await self.learn()
        async with self._listing:
            while self._listed < self._epochs.last:
                await self._list()
                await self.learn()
        if self._settled < self._epochs.last:
            await self._look_for_lists(self._epochs.last)

    async def until_listed(self, epoch: int) -> None:
        """Waits until all gateways have listed what they hold, or count as dead."""
        while self._settled < epoch:
            await self._look_for_lists(epoch)
            if self._settled < epoch:
                await asyncio.sleep(LOOK_S)

    async def give_up(self, damaged: Mapping[str, int], above: int = 0) -> dict[str, int]:
        """Raises new epochs, above this one, for states that were built under these epochs but cannot be trusted.
        Returns the new epochs.
        """
        if not damaged:
            return {}
        named = ", ".join(sorted(damaged)[:NAMED])
        log.warning("limiter states are damaged or lost: %d, as of %s", len(damaged), named)
        async with writing(self._database) as conn:
            await limiter_state.raise_for_tenants(conn, damaged, clock.now_ms(), above)
        await self.follow()
        return {tenant_id: self._epochs.of(tenant_id) for tenant_id in damaged}

    def of(self, tenant_id: str) -> int:
        """Returns the tenant's epoch as last learned."""
        return self._epochs.of(tenant_id)

    @property
    def life(self) -> str:
        """The data life of Redis of which the epochs were last learned."""
        return self._life

    @property
    def is_current(self) -> bool:
        """Whether every loss of Redis' data is known, as far as this gateway can tell without asking."""
        return bool(self._life) and self._link.life == self._life

    async def _list(self) -> None:
        """Lists the open requests. They were granted before this epoch or under it. Endings are in SQL before the list
        is.
        """
        epoch, held = self._epochs.last, self._open_reservations.listed()
        await self._caught_up()
        async with writing(self._database) as conn:
            await limiter_state.list_running(conn, self._open_reservations.slot, epoch, held, clock.now_ms(), DEAD_MS)
        self._listed = epoch

    async def _look_for_lists(self, epoch: int) -> None:
        """Notes the epoch as settled if it is. No gateway comes to be behind it later: who joins has listed for the last
        one.
        """
        async with reading(self._database) as conn:
            behind = await limiter_state.num_unlisted(conn, epoch)
        if not behind or self._epochs.is_over(epoch):
            self._settled = max(self._settled, epoch)
            self._epochs.forget(self._settled)


@asynccontextmanager
async def reading(database: Database) -> AsyncIterator[AsyncConnection]:
    """Gives one snapshot of SQL. Raises BooksUnavailable."""
    with_sql = database.read()
    async with _sql_errors(), with_sql as conn:
        yield conn


@asynccontextmanager
async def writing(database: Database) -> AsyncIterator[AsyncConnection]:
    """Gives one transaction of SQL. Raises BooksUnavailable."""
    with_sql = database.write()
    async with _sql_errors(), with_sql as conn:
        yield conn


@asynccontextmanager
async def _sql_errors() -> AsyncIterator[None]:
    try:
        yield
    except (SQLAlchemyError, OSError) as reason:
        raise BooksUnavailable(f"SQL does not answer: {reason}") from reason
