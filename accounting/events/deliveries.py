"""Deliveries from the outbox: claimed, tried, ended. The schedule is in SQL, so any number of senders may start and
stop.

A tenant's deliveries queue in its lane, those to the operator's webhooks apart from those to the tenant's own: receivers
that a tenant chose hold up nothing of the operator's. A claim locks lanes (locked ones are skipped), least recently
served first, and takes at most `PLACES` deliveries of either kind from each. A delivery counts against `PLACES` until
its try has ended or its claim has run out. A claim counts as a try, so a delivery whose sender dies each time is not tried for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, Row, delete, exists, func, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncConnection

from accounting.database.db import among
from accounting.tables.outbox_models import Outbox, OutboxLane, Webhook

PLACES = 2
"""The most deliveries under way at once per tenant, to the operator's webhooks and to its own each."""
CLAIM_MS = 60_000
"""A bound far above the time of a try, however slowly the receiver's name is looked up."""
DELAYS_S = (5, 30, 120, 300, 900, 1_800, 3_600, 7_200, 14_400, 21_600, 36_000)
"""Seconds between tries: 12 tries in 24 hours."""
MAX_TRIES = len(DELAYS_S) + 1
MAX_WAITING = 100_000
"""The most deliveries that may wait per webhook. A webhook with more gets no new events until half of them are gone."""
DELIVERED_KEPT_MS, DEAD_KEPT_MS = 1 * 86_400_000, 30 * 86_400_000
PURGED_AT_ONCE = 1_000


class Queue(NamedTuple):
    """The deliveries of a lane that are of one kind: to the tenant's own webhooks, or to the operator's."""

    lane: str
    is_tenants: bool


class Delivery(msgspec.Struct, frozen=True):
    lane: str
    event_id: str
    webhook_id: str
    attempt: int
    """The number of this try, counted from 1."""
    url: str
    sealed_secret: bytes
    body: str
    is_tenants: bool
    """It goes to public addresses only."""

    @property
    def queue(self) -> Queue:
        return Queue(self.lane, self.is_tenants)


class Schedule(msgspec.Struct, frozen=True):
    """Times of tries. `jitter` returns 0 to 1 and is called for each try. `scale` shortens all times, for tests."""

    jitter: Callable[[], float]
    scale: float = 1.0

    def delay_ms(self, attempt: int) -> int:
        """Returns the milliseconds to wait after that try. They are up to a tenth shorter than the schedule, so that
        deliveries that failed together do not come back together."""
        delay_s = DELAYS_S[min(attempt, len(DELAYS_S)) - 1]
        return int(1000 * delay_s * self.scale * (1 - self.jitter() / 10))


async def any_due(conn: AsyncConnection, now: int, shut_out: Collection[Queue] = ()) -> bool:
    due = select(OutboxLane.tenant_id).where(_may_begin(conn, now, shut_out))
    return (await conn.execute(due.limit(1))).first() is not None


async def any_waiting(conn: AsyncConnection) -> bool:
    """Says whether a delivery has not ended: one is due now, or will be without anything being written."""
    return (
        await conn.execute(select(Outbox.event_id).where(Outbox.ended_at_ms.is_(None)).limit(1))
    ).first() is not None


async def claim(
    conn: AsyncConnection, now: int, room: int, schedule: Schedule, shut_out: Collection[Queue] = ()
) -> list[Delivery]:
    """Claims at most `room` deliveries, spread over as many tenants as possible, none of them of the queues
    `shut_out`."""
    lanes = (
        select(OutboxLane.tenant_id)
        .where(_may_begin(conn, now, shut_out))
        .order_by(OutboxLane.last_turn_ms, OutboxLane.tenant_id)
        .limit(room)
        .with_for_update(skip_locked=True, key_share=True)  # those who write events need not wait
    )
    chosen = list((await conn.execute(lanes)).scalars())
    rows: list[Row[Any]] = []
    # The lanes are locked now, and each is read by its own statement: claims of another sender on it are seen
    # completely.
    for lane in chosen:
        if len(rows) >= room:
            break
        for queue in (Queue(lane, False), Queue(lane, True)):
            if queue not in shut_out:
                rows += await _next_of(conn, queue, now, min(PLACES, room - len(rows)))
    if rows:
        served = update(OutboxLane).where(OutboxLane.tenant_id.in_({row.lane for row in rows}))
        await conn.execute(served.values(last_turn_ms=now))
    claimed = [
        Delivery(
            row.lane, row.event_id, row.webhook_id, row.attempts + 1, row.url, row.secret, row.body, row.is_tenants
        )
        for row in rows
    ]
    for one in claimed:
        await conn.execute(
            _row(one.event_id, one.webhook_id).values(
                attempts=one.attempt,
                claimed_until_ms=now + CLAIM_MS,
                deliver_after_ms=now + max(schedule.delay_ms(one.attempt), 1),
            )
        )
    return claimed


async def _next_of(conn: AsyncConnection, queue: Queue, now: int, places: int) -> Sequence[Row[Any]]:
    mine = Outbox.lane == queue.lane, Outbox.is_tenants == queue.is_tenants
    taken = select(func.count()).where(*mine, Outbox.claimed_until_ms > now)
    free = min(places, PLACES - int(await conn.scalar(taken) or 0))
    if free <= 0:
        return []
    query = (
        select(
            Outbox.lane,
            Outbox.event_id,
            Outbox.webhook_id,
            Outbox.attempts,
            Outbox.body,
            Webhook.url,
            Webhook.secret,
            Webhook.is_tenants,
        )
        .join(Webhook, Webhook.id == Outbox.webhook_id)
        .where(*mine, *_waits(now))
        .order_by(Outbox.deliver_after_ms, Outbox.event_id)
        .limit(free)
    )
    return list(await conn.execute(query))


async def delivered(conn: AsyncConnection, done: Delivery, now: int) -> None:
    await conn.execute(_mine(done).values(state="delivered", claimed_until_ms=0, ended_at_ms=now, last_error=None))


async def failed(conn: AsyncConnection, tried: Delivery, error: str, now: int) -> bool:
    """Notes a failed try. Returns True if it was the last one and the delivery is dead."""
    is_last = tried.attempt >= MAX_TRIES
    ended: dict[str, Any] = {"state": "dead", "ended_at_ms": now} if is_last else {}
    await conn.execute(_mine(tried).values(claimed_until_ms=0, last_error=error, **ended))
    return is_last


async def tidy(conn: AsyncConnection, now: int) -> None:
    """Marks last tries of dead senders as dead, and sets which webhooks are full."""
    lost = update(Outbox).where(
        Outbox.ended_at_ms.is_(None), Outbox.attempts >= MAX_TRIES, Outbox.claimed_until_ms <= now
    )
    await conn.execute(lost.values(state="dead", ended_at_ms=now, last_error="lost", claimed_until_ms=0))
    await _mark_full(conn)


async def purge(conn: AsyncConnection, now: int) -> bool:
    """Deletes deliveries that ended long ago, `PURGED_AT_ONCE` of each state at most. Returns whether more may be
    there."""
    may_be_more = False
    for state, kept_ms in (("delivered", DELIVERED_KEPT_MS), ("dead", DEAD_KEPT_MS)):
        old = select(Outbox.event_id, Outbox.webhook_id).where(
            Outbox.state == state, Outbox.ended_at_ms < now - kept_ms
        )
        row = tuple_(Outbox.event_id, Outbox.webhook_id)
        purged = await conn.execute(delete(Outbox).where(row.in_(old.limit(PURGED_AT_ONCE))))
        may_be_more |= purged.rowcount >= PURGED_AT_ONCE
    return may_be_more


async def _mark_full(conn: AsyncConnection) -> None:
    query = select(Outbox.webhook_id, func.count()).where(Outbox.ended_at_ms.is_(None))
    waiting = {row[0]: row[1] for row in await conn.execute(query.group_by(Outbox.webhook_id))}
    for webhook_id, was_full in (await conn.execute(select(Webhook.id, Webhook.is_full))).all():
        limit = MAX_WAITING // 2 if was_full else MAX_WAITING
        is_full = waiting.get(webhook_id, 0) > limit
        if is_full != was_full:
            changed = update(Webhook).where(Webhook.id == webhook_id)
            await conn.execute(changed.values(is_full=is_full))


def _waits(now: int) -> tuple[Any, ...]:
    return (
        Outbox.ended_at_ms.is_(None),
        Outbox.deliver_after_ms <= now,
        Outbox.claimed_until_ms <= now,
        Outbox.attempts < MAX_TRIES,
    )


def _may_begin(conn: AsyncConnection, now: int, shut_out: Collection[Queue]) -> ColumnElement[bool]:
    kinds = []
    for is_tenants in (False, True):
        kept_out = [queue.lane for queue in shut_out if queue.is_tenants == is_tenants]
        kinds.append(_is_due(now, is_tenants))
        if kept_out:
            kinds[-1] &= ~among(conn, OutboxLane.tenant_id, kept_out)
    return or_(*kinds)


def _is_due(now: int, is_tenants: bool) -> ColumnElement[bool]:
    mine = Outbox.lane == OutboxLane.tenant_id, Outbox.is_tenants == is_tenants
    taken = select(func.count()).where(*mine, Outbox.claimed_until_ms > now).correlate(OutboxLane).scalar_subquery()
    waiting = exists().where(*mine, *_waits(now))
    return waiting & (taken < PLACES)


def _row(event_id: str, webhook_id: str) -> Any:
    return update(Outbox).where(Outbox.event_id == event_id, Outbox.webhook_id == webhook_id)


def _mine(done: Delivery) -> Any:
    """Returns the row of a delivery, for this try alone: a later claim has another number."""
    return _row(done.event_id, done.webhook_id).where(Outbox.ended_at_ms.is_(None), Outbox.attempts == done.attempt)
