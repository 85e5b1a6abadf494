"""Rebuilds tenants' limiter state from SQL when Redis lost it (metering.md 6.5). Admission waits until it is there.

Every loss is an incident with an epoch, one number for all gateways. Once a gateway knows the epoch, it ships its
endings to SQL and lists its open requests. Then one gateway reads both in one snapshot and SETs the state. A grant
counts only if the epoch is still the same when its answer arrives, so every open request is in a list.

A tenant is rebuilt when a request needs it. Tenants that are needed while a group is being rebuilt form the next group.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import Database
from accounting.limits import limiter_books, limiter_state
from accounting.limits.limiter_books import CLOCKS_APART_MS, Snapshot
from accounting.limits.limiter_state import Incident
from accounting.values import clock
from gateway.base.redis_link import Argument, BooksUnavailable, LimiterUnavailable, RedisLink
from gateway.limiter import rebuilt_state
from gateway.limiter.claims import Claims
from gateway.limiter.open_reservations import OpenReservations
from gateway.limiter.redis_keys import open_key, reservation_key, state_key, window_key

log = logging.getLogger(__name__)

TERM_MS = 60_000
WAIT_S = 2.0
"""How long a request waits for its tenant's state before it is refused with a time to come again."""
DEAD_MS = 3_000
"""A gateway that has not listed by then counts as dead."""
CLAIMED_S = 1.0
LOOK_S = 0.05
NAMED = 5
MAX_GROUP = 500
"""The most tenants that are rebuilt together."""
MAX_SENT = 32
"""The most tenants' scripts in one round trip, which must end within the limiter's timeout."""


@dataclass(frozen=True)
class Moment:
    """One moment on two clocks: Redis' and that of the books."""

    redis_ms: int
    books_ms: int

    @property
    def ahead_s(self) -> int:
        """How far Redis' clock is ahead of the books' clock, in seconds. A difference of a few seconds counts as 0."""
        ahead_ms = self.redis_ms - self.books_ms
        return 0 if abs(ahead_ms) <= CLOCKS_APART_MS else round(ahead_ms / 1000)


@dataclass
class Epochs:
    """The epochs in force, as far as this gateway knows."""

    last: int = 0
    of_all: int = 0
    of_one: dict[str, int] = field(default_factory=dict)
    raised_at_ms: dict[int, int] = field(default_factory=dict)
    noted_at: dict[int, float] = field(default_factory=dict)
    """The time at which this gateway learned of each epoch. The gateway that raised it may have another clock."""

    def of(self, tenant_id: str) -> int:
        return max(self.of_all, self.of_one.get(tenant_id, 0))

    def note(self, incident: Incident) -> None:
        self.last = incident.epoch
        self.raised_at_ms[incident.epoch] = incident.raised_at_ms
        self.noted_at[incident.epoch] = time.monotonic()
        if incident.tenant_id is not None:
            self.of_one[incident.tenant_id] = incident.epoch
            return
        self.of_all = incident.epoch
        self.of_one.clear()
        self.raised_at_ms = {incident.epoch: incident.raised_at_ms}
        self.noted_at = {incident.epoch: self.noted_at[incident.epoch]}

    def is_over(self, epoch: int) -> bool:
        """Returns True once gateways that have not listed for this epoch count as dead."""
        late_ms = clock.now_ms() - self.raised_at_ms.get(epoch, 0)
        known_s = time.monotonic() - self.noted_at.get(epoch, 0.0)
        return late_ms > DEAD_MS or known_s * 1000 > DEAD_MS


@dataclass
class Group:
    """Tenants that are rebuilt together. Each has the epoch that was refused, and the epoch of the state that was
    found.
    """

    asked: dict[str, tuple[int, int]] = field(default_factory=dict)
    has_begun: bool = False
    task: asyncio.Task[None] = field(init=False)

    @property
    def takes_more(self) -> bool:
        return not self.has_begun and len(self.asked) < MAX_GROUP


class Rebuilder:
    """Rebuilds lost states. Call `join()` before the first request, and `leave()` when no reservation is
    open any more.
    """

    def __init__(
        self,
        link: RedisLink,
        database: Database,
        open_reservations: OpenReservations,
        *,
        caught_up: Callable[[], Awaitable[None]],
        now_ms: Callable[[], int] | None = None,
        books_ms: Callable[[], int] | None = None,
    ) -> None:
        """`caught_up` returns when every ending that is durable now is in SQL. `now_ms` replaces the clock of Redis.
        `books_ms` is the clock of the books, which is this machine's outside tests.
        """
        self._link = link
        self._database = database
        self._open_reservations = open_reservations
        self._claims = Claims(link, database, open_reservations.slot)
        self._caught_up = caught_up
        self._now_ms = now_ms
        self._books_ms = books_ms or now_ms or clock.now_ms
        self._epochs = Epochs()
        self._life = ""
        self._listed = -1
        self._following = asyncio.Lock()
        self._reading = asyncio.Lock()
        self._sending = asyncio.Lock()
        self._newest = Group(has_begun=True)  # the first caller begins another
        self.num_built = 0
        """The number of states that this process has built."""
        self._building: dict[str, asyncio.Task[None]] = {}

    async def join(self) -> None:
        """Registers this slot. Raises LimiterUnavailable."""
        if self._listed >= 0:
            return
        await self._caught_up()
        async with self._write() as conn:
            self._listed = await limiter_state.join(conn, self._open_reservations.slot, clock.now_ms())
        self._claims.keep()

    async def leave(self) -> None:
        for task in set(self._building.values()):
            task.cancel()
        await asyncio.gather(*self._building.values(), return_exceptions=True)
        await self._claims.close()
        try:
            async with self._write() as conn:
                await limiter_state.leave(conn, self._open_reservations.slot)
        except LimiterUnavailable as reason:
            log.warning("a rebuild of the limiter will wait for this gateway: %s", reason)

    async def epoch(self, tenant_id: str) -> int:
        """Returns the tenant's epoch. There is a round trip only after a loss. Raises LimiterUnavailable."""
        if not self._is_current():
            async with self._following:
                if not self._is_current():
                    await self._follow()
        return self._epochs.of(tenant_id)

    def is_in_force(self, tenant_id: str, epoch: int) -> bool:
        return self._link.life == self._life and self._epochs.of(tenant_id) == epoch

    async def follow(self) -> None:
        """Notices losses here or elsewhere, and lists what this gateway holds. Raises LimiterUnavailable."""
        async with self._following:
            await self._follow()

    async def rebuild(self, tenant_id: str, epoch: int, found: int) -> None:
        """Returns when the tenant's state may be asked again. `epoch` was refused; `found` is the state's own epoch.
        Raises LimiterUnavailable.
        """
        task = self._building.get(tenant_id) or self._join_group(tenant_id, epoch, found)
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.shield(task)
        except TimeoutError:
            raise LimiterUnavailable("limiter is being rebuilt") from None

    def _is_current(self) -> bool:
        return bool(self._life) and self._link.life == self._life

    async def _follow(self) -> None:
        await self.join()
        life = await self._link.refresh_life()
        if life != self._life:
            async with self._write() as conn:
                await limiter_state.raise_for_life(conn, life, clock.now_ms())
        while True:
            async with self._read() as conn:
                found = await limiter_state.incidents(conn, self._epochs.last)
            for incident in found:
                self._epochs.note(incident)
            self._life = life
            if self._listed >= self._epochs.last:
                return
            await self._list()

    def _join_group(self, tenant_id: str, epoch: int, found: int) -> asyncio.Task[None]:
        group = self._newest
        if not group.takes_more:
            group = self._newest = Group()
            group.task = asyncio.create_task(self._rebuild(group))
            group.task.add_done_callback(lambda _: self._forget(group))
            group.task.add_done_callback(_retrieve)
        group.asked[tenant_id] = (epoch, found)
        self._building[tenant_id] = group.task
        return group.task

    def _forget(self, group: Group) -> None:
        for tenant_id in group.asked:
            del self._building[tenant_id]

    async def _rebuild(self, group: Group) -> None:
        async with self._reading:
            group.has_begun = True  # tenants that were added until now are in this group
            due = await self._due(group)
            if not due:
                return
            await self._until_listed(max(due.values()))
            now = Moment(await self._redis_ms(), self._books_ms())
            taken = await self._claims.take(due)
            mine, snapshots = await self._read_books(taken, now.books_ms)
            await self._sending.acquire()
        try:  # the next group is read meanwhile
            await self._build(mine, snapshots, now)
        finally:
            self._sending.release()
            self._claims.keep()
        # For the other tenants, the gateway that claimed them has died, or it has built their states.
        await self._give_up(await self._missing({t: due[t] for t in due.keys() - mine.keys()}))

    async def _due(self, group: Group) -> dict[str, int]:
        """Returns the tenants to rebuild, each with its epoch. The other tenants' states are already there."""
        await self.follow()
        due, damaged = {}, {}
        for tenant_id, (asked, found) in group.asked.items():
            epoch = self._epochs.of(tenant_id)
            if found < epoch:
                due[tenant_id] = epoch
            elif found == asked == epoch:
                damaged[tenant_id] = epoch
        return due | await self._give_up(damaged)

    async def _list(self) -> None:
        """Lists the open requests. They were granted before this epoch or under it. Endings are in SQL before the list
        is.
        """
        epoch, held = self._epochs.last, self._open_reservations.listed()
        await self._caught_up()
        async with self._write() as conn:
            await limiter_state.list_running(conn, self._open_reservations.slot, epoch, held, clock.now_ms(), DEAD_MS)
        self._listed = epoch

    async def _give_up(self, damaged: Mapping[str, int]) -> dict[str, int]:
        """Raises new epochs for states that were built under these epochs but cannot be trusted. Returns the new
        epochs.
        """
        if not damaged:
            return {}
        named = ", ".join(sorted(damaged)[:NAMED])
        log.warning("limiter states are damaged or lost: %d, as of %s", len(damaged), named)
        async with self._write() as conn:
            await limiter_state.raise_for_tenants(conn, damaged, clock.now_ms())
        await self.follow()
        return {tenant_id: self._epochs.of(tenant_id) for tenant_id in damaged}

    async def _until_listed(self, epoch: int) -> None:
        """Waits until all gateways have listed what they hold, or count as dead."""
        while True:
            async with self._read() as conn:
                behind = await limiter_state.num_unlisted(conn, epoch)
            if not behind or self._epochs.is_over(epoch):
                return
            await asyncio.sleep(LOOK_S)

    async def _missing(self, epochs: Mapping[str, int]) -> dict[str, int]:
        """Returns those tenants that another gateway claimed and has not built in time."""
        until, missing = time.monotonic() + CLAIMED_S, dict(epochs)
        while missing and time.monotonic() < until:
            found = await asyncio.gather(
                *(self._link.command("HGET", state_key(tenant_id), "ep") for tenant_id in missing)
            )
            missing = {
                tenant_id: epoch
                for (tenant_id, epoch), built in zip(missing.items(), found, strict=True)
                if built is None or int(built) < epoch
            }
            if missing:
                await asyncio.sleep(LOOK_S)
        return missing

    async def _read_books(self, taken: Mapping[str, int], now_ms: int) -> tuple[dict[str, int], Mapping[str, Snapshot]]:
        """Returns the tenants to build, without those whose claim is in SQL already, and their snapshots."""
        if not taken:
            return {}, {}
        async with self._read() as conn:
            claimed = await limiter_state.claimed(conn, taken)
            mine = {tenant_id: epoch for tenant_id, epoch in taken.items() if tenant_id not in claimed}
            return mine, await limiter_books.snapshots(conn, mine, now_ms) if mine else {}

    async def _build(self, epochs: Mapping[str, int], snapshots: Mapping[str, Snapshot], now: Moment) -> None:
        tenants = list(epochs)
        for start in range(0, len(tenants), MAX_SENT):
            some = tenants[start : start + MAX_SENT]
            await asyncio.gather(*(self._set(t, epochs[t], snapshots[t], now) for t in some))

    async def _persist(self, write: Callable[[], Awaitable[None]]) -> None:
        """Repeats a write while Redis is slow for a moment. A claimed state must be built; otherwise a further epoch
        would be due for it.
        """
        until = time.monotonic() + WAIT_S
        while True:
            try:
                return await write()
            except LimiterUnavailable:
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(LOOK_S)

    async def _set(self, tenant_id: str, epoch: int, snapshot: Snapshot, now: Moment) -> None:
        await self._persist(lambda: self._try_to_set(tenant_id, epoch, snapshot, now))

    async def _try_to_set(self, tenant_id: str, epoch: int, snapshot: Snapshot, now: Moment) -> None:
        keys, ask = _arguments(tenant_id, epoch, snapshot, now)
        given: Argument = "" if self._now_ms is None else self._now_ms()
        answer = await self._link.script("rebuild", keys, (given, ask))
        while answer[0] == "forget":
            keys += [reservation_key(tenant_id, request_id) for request_id in answer[1]]
            answer = await self._link.script("rebuild", keys, (given, ask))
        self.num_built += 1

    async def _redis_ms(self) -> int:
        if self._now_ms is not None:
            return self._now_ms()
        seconds, microseconds = await self._link.command("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000

    @asynccontextmanager
    async def _read(self) -> AsyncIterator[AsyncConnection]:
        with_sql = self._database.read()
        async with _sql_errors(), with_sql as conn:
            yield conn

    @asynccontextmanager
    async def _write(self) -> AsyncIterator[AsyncConnection]:
        with_sql = self._database.write()
        async with _sql_errors(), with_sql as conn:
            yield conn


@asynccontextmanager
async def _sql_errors() -> AsyncIterator[None]:
    try:
        yield
    except (SQLAlchemyError, OSError) as reason:
        raise BooksUnavailable(f"SQL does not answer: {reason}") from reason


def _arguments(tenant_id: str, epoch: int, snapshot: Snapshot, now: Moment) -> tuple[list[str], bytes]:
    """Returns the KEYS and the JSON argument of `rebuild.lua`."""
    now_s, ahead_s = now.redis_ms // 1000, now.ahead_s
    windows = rebuilt_state.windows(snapshot, now_s, ahead_s)
    requests = rebuilt_state.requests(snapshot, now_s, ahead_s)
    keys = [state_key(tenant_id), open_key(tenant_id), reservation_key(tenant_id, "")]
    keys += [window_key(tenant_id, name) for name in windows]
    keys += [reservation_key(tenant_id, request["id"]) for request in requests]
    ask = {
        "epoch": epoch,
        "windows": [sorted(buckets.items()) for buckets in windows.values()],
        "budgets": rebuilt_state.budgets(snapshot, now.books_ms),
        "built": now.books_ms,
        "requests": requests,
        "term": TERM_MS,
    }
    return keys, msgspec.json.encode(ask)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieves the exception of a rebuild, because no request may be waiting for it any more."""
    if not task.cancelled() and (failure := task.exception()) is not None:
        log.info("a rebuild failed: %s", failure)
