"""Rebuilds tenants' limiter state from SQL when Redis lost it (metering.md 6.5). Admission waits until it is there.

Every loss is an incident with an epoch (`incidents.py`). Once every gateway has listed its open requests for it, one
gateway reads lists and endings in one snapshot and SETs the state, unless Redis has lost its data again since the epoch
was learned. A grant counts only if the epoch is still the same when its answer arrives, so every open request is in a
list.

A tenant is rebuilt when a request needs it. Tenants that are needed while a group is being rebuilt form the next group.
There are two lanes of groups: what has to wait for lists, and so for SQL's writer and for other gateways, holds up
nobody whose lists are there, such as a new tenant.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import Context
from dataclasses import dataclass, field

import msgspec

from accounting.database.db import Database
from accounting.limits import limiter_books, limiter_state
from accounting.limits.limiter_books import CLOCKS_APART_MS, Snapshot
from accounting.values import clock
from gateway.base.redis_link import Argument, LimiterUnavailable, RedisLink
from gateway.limiter import rebuilt_state
from gateway.limiter.claims import Claims
from gateway.limiter.incidents import Incidents, reading
from gateway.limiter.redis_keys import open_key, reservation_key, state_key, window_key

log = logging.getLogger(__name__)

TERM_MS = 60_000
WAIT_S = 2.0
"""How long a request waits for its tenant's state before it is refused with a time to come again."""
CLAIMED_S = 1.0
LOOK_S = 0.05
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


@dataclass
class Lane:
    """Groups that are read one after the other."""

    newest: Group = field(default_factory=lambda: Group(has_begun=True))  # the first caller begins another
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class Rebuilder:
    """Rebuilds lost states. `leave()` must be awaited when no reservation is open any more."""

    def __init__(
        self,
        link: RedisLink,
        database: Database,
        incidents: Incidents,
        slot: int,
        *,
        now_ms: Callable[[], int] | None = None,
        books_ms: Callable[[], int] | None = None,
    ) -> None:
        """`now_ms` replaces the clock of Redis. `books_ms` is the clock of the books, which is this machine's outside
        tests.
        """
        self._link = link
        self._database = database
        self._incidents = incidents
        self._claims = Claims(link, database, slot)
        self._now_ms = now_ms
        self._books_ms = books_ms or now_ms or clock.now_ms
        self._listed = Lane()
        """Tenants whose lists are in SQL. Nothing in this lane waits for SQL's writer or for another gateway's list."""
        self._unlisted = Lane()
        """Tenants that lists are awaited for, and those with a state that is damaged or that nobody built."""
        self._sending = asyncio.Lock()
        self.num_built = 0
        """The number of states that this process has built."""
        self._building: dict[str, asyncio.Task[None]] = {}

    def keep_claims(self) -> None:
        """Begins to bring into SQL what gateways that were killed have claimed."""
        self._claims.keep()

    async def leave(self) -> None:
        for task in set(self._building.values()):
            task.cancel()
        await asyncio.gather(*self._building.values(), return_exceptions=True)
        await self._claims.close()
        await self._incidents.leave()

    async def rebuild(self, tenant_id: str, epoch: int, found: int) -> None:
        """Returns when the tenant's state may be asked again. `epoch` was refused; `found` is the state's own epoch.
        Raises LimiterUnavailable.
        """
        task = self._building.get(tenant_id)
        if task is None:
            is_lost = found < self._incidents.of(tenant_id)
            lane = self._listed if is_lost and self._incidents.is_settled(tenant_id) else self._unlisted
            task = self._join_group(lane, tenant_id, epoch, found)
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.shield(task)
        except TimeoutError:
            raise LimiterUnavailable("limiter is being rebuilt") from None

    def _join_group(self, lane: Lane, tenant_id: str, epoch: int, found: int) -> asyncio.Task[None]:
        group = lane.newest
        if not group.takes_more:
            group = lane.newest = Group()
            rebuilt = self._rebuild_listed(group) if lane is self._listed else self._rebuild_unlisted(group)
            group.task = asyncio.create_task(rebuilt, context=Context())  # it is of no one request
            group.task.add_done_callback(lambda _: self._forget(group))
            group.task.add_done_callback(_retrieve)
        group.asked[tenant_id] = (epoch, found)
        self._building[tenant_id] = group.task
        return group.task

    def _forget(self, group: Group) -> None:
        for tenant_id in group.asked:
            if self._building.get(tenant_id) is group.task:  # else it went on to the other lane
                del self._building[tenant_id]

    async def _rebuild_listed(self, group: Group) -> None:
        """Builds those tenants whose lists are still all there. The others go on in the other lane: those of a newer
        epoch, and those that somebody else claimed and has not built in time.
        """
        async with self._listed.reading:
            group.has_begun = True  # tenants that were added until now are in this group
            await self._incidents.learn()
            life = self._incidents.life
            due, _ = self._lost_and_damaged(group)
            listed = {tenant_id: epoch for tenant_id, epoch in due.items() if self._incidents.is_settled(tenant_id)}
            mine, snapshots, now = await self._claim(listed)
            await self._sending.acquire()
        await self._build(mine, snapshots, now, life)
        missing = await self._missing({t: due[t] for t in listed.keys() - mine.keys()})
        for tenant_id in (due.keys() - listed.keys()) | missing.keys():
            _ = self._join_group(self._unlisted, tenant_id, *group.asked[tenant_id])

    async def _rebuild_unlisted(self, group: Group) -> None:
        async with self._unlisted.reading:
            group.has_begun = True  # tenants that were added until now are in this group
            await self._incidents.follow()
            life = self._incidents.life
            lost, damaged = self._lost_and_damaged(group)
            due = lost | await self._incidents.give_up(damaged, max(found for _, found in group.asked.values()))
            if not due:
                return
            await self._incidents.until_listed(max(due.values()))
            mine, snapshots, now = await self._claim(due)
            await self._sending.acquire()
        await self._build(mine, snapshots, now, life)
        # For the other tenants, the gateway that claimed them has died, or it has built their states.
        await self._incidents.give_up(await self._missing({t: due[t] for t in due.keys() - mine.keys()}))

    def _lost_and_damaged(self, group: Group) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the tenants whose state is lost and those whose state is damaged, each with its epoch. The other
        tenants' states are already there.
        """
        lost, damaged = {}, {}
        for tenant_id, (asked, found) in group.asked.items():
            epoch = self._incidents.of(tenant_id)
            if found < epoch:
                lost[tenant_id] = epoch
            elif found == asked == epoch or found > epoch:  # SQL may have lost the incident that it was built under
                damaged[tenant_id] = epoch
        return lost, damaged

    async def _claim(self, due: Mapping[str, int]) -> tuple[dict[str, int], Mapping[str, Snapshot], Moment]:
        """Returns the tenants to build, their snapshots, and the moment of those."""
        now = Moment(await self._redis_ms(), self._books_ms())
        taken = await self._claims.take(due)
        return *await self._read_books(taken, now.books_ms), now

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
        async with reading(self._database) as conn:
            claimed = await limiter_state.claimed(conn, taken)
            mine = {tenant_id: epoch for tenant_id, epoch in taken.items() if tenant_id not in claimed}
            return mine, await limiter_books.snapshots(conn, mine, now_ms) if mine else {}

    async def _build(
        self, epochs: Mapping[str, int], snapshots: Mapping[str, Snapshot], now: Moment, life: str
    ) -> None:
        """Sets the states and releases `_sending`. The next group is read meanwhile, and those after it grow. `life` is the
        data life of Redis in which the epochs were in force."""
        tenants = list(epochs)
        try:
            for start in range(0, len(tenants), MAX_SENT):
                some = tenants[start : start + MAX_SENT]
                await asyncio.gather(*(self._set(t, epochs[t], snapshots[t], now, life) for t in some))
        finally:
            self._sending.release()
            self._claims.keep()

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

    async def _set(self, tenant_id: str, epoch: int, snapshot: Snapshot, now: Moment, life: str) -> None:
        await self._persist(lambda: self._try_to_set(tenant_id, epoch, snapshot, now, life))

    async def _try_to_set(self, tenant_id: str, epoch: int, snapshot: Snapshot, now: Moment, life: str) -> None:
        keys, ask = _arguments(tenant_id, epoch, snapshot, now, life)
        keys.insert(0, self._link.life_key)
        given: Argument = "" if self._now_ms is None else self._now_ms()
        answer = await self._link.script("rebuild", keys, (given, ask))
        while answer[0] == "forget":
            keys += [reservation_key(tenant_id, request_id) for request_id in answer[1]]
            answer = await self._link.script("rebuild", keys, (given, ask))
        self.num_built += answer[0] != "lost"

    async def _redis_ms(self) -> int:
        if self._now_ms is not None:
            return self._now_ms()
        seconds, microseconds = await self._link.command("TIME")
        return int(seconds) * 1000 + int(microseconds) // 1000


def _arguments(tenant_id: str, epoch: int, snapshot: Snapshot, now: Moment, life: str) -> tuple[list[str], bytes]:
    """Returns the KEYS of `rebuild.lua` from the second on, and its JSON argument."""
    now_s, ahead_s = now.redis_ms // 1000, now.ahead_s
    windows = rebuilt_state.windows(snapshot, now_s, ahead_s)
    requests = rebuilt_state.requests(snapshot, now_s, ahead_s)
    keys = [state_key(tenant_id), open_key(tenant_id), reservation_key(tenant_id, "")]
    keys += [window_key(tenant_id, name) for name in windows]
    keys += [reservation_key(tenant_id, request["id"]) for request in requests]
    ask = {
        "life": life,
        "epoch": epoch,
        "windows": [sorted(buckets.items()) for buckets in windows.values()],
        "budgets": rebuilt_state.budgets(snapshot, now.books_ms),
        "built": snapshot.until_ms,
        "requests": requests,
        "term": TERM_MS,
    }
    return keys, msgspec.json.encode(ask)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieves the exception of a rebuild, because no request may be waiting for it any more."""
    if not task.cancelled() and (failure := task.exception()) is not None:
        log.info("a rebuild failed: %s", failure)
