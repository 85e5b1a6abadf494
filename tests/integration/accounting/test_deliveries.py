"""How events get out of the outbox: two places per tenant, twelve tries, dead after the last."""

from __future__ import annotations

import asyncio

import pytest
from load import stretched
from sqlalchemy import func, select

from accounting.events import deliveries, outbox, webhooks
from accounting.events.deliveries import MAX_TRIES, PLACES, Queue, Schedule
from accounting.events.egress import Egress
from accounting.events.events import Event
from accounting.tables.outbox_models import Outbox
from accounting.tenants import tenants

STEADY = Schedule(lambda: 0.0)
NOW = 1_800_000_000_000


async def hook(conn, lane, is_tenants=False):
    made = await webhooks.create(
        conn,
        b"m" * 32,
        Egress(),
        url="https://example.com/hook",
        types=None,
        tenant_id=lane,
        now=1,
        actor="cli",
        is_tenants=is_tenants,
    )
    return made.info.id


async def tenant(conn, name="one"):
    return (await tenants.create(conn, name, now=1)).id


def event(name, tenant_id):
    return Event(name, "headgate.usage.v1", tenant_id, 1, {"n": name})


async def num_kept(conn):
    return await conn.scalar(select(func.count()).select_from(Outbox))


async def fill(conn, lane, names):
    webhook_id = await hook(conn, lane)
    await outbox.write(conn, [event(f"{lane}-{name}", lane) for name in names])
    return webhook_id


async def later(conn):
    """After everything that was just written became due."""
    return int(await conn.scalar(select(func.max(Outbox.created_at_ms))) or 0) + 1


async def test_two_places_per_tenant_and_no_tenant_waits_for_another(conn):
    one, two = await tenant(conn, "one"), await tenant(conn, "two")
    await fill(conn, one, range(20))
    await fill(conn, two, range(3))
    now = await later(conn)
    first = await deliveries.claim(conn, now, 64, STEADY)
    lanes = [claimed.event_id.rpartition("-")[0] for claimed in first]
    assert sorted(lanes) == sorted([one] * PLACES + [two] * PLACES)
    assert not await deliveries.any_due(conn, now)
    assert await deliveries.claim(conn, now, 64, STEADY) == []
    await deliveries.delivered(conn, first[0], now)
    [next_] = await deliveries.claim(conn, now, 64, STEADY)
    assert next_.event_id.rpartition("-")[0] == first[0].event_id.rpartition("-")[0]


async def test_a_tenants_own_webhooks_hold_up_none_of_the_operators(conn):
    """Its receivers hung, and what the operator wanted to hear of it waited behind a hundred thousand events."""
    lane = await tenant(conn)
    own = [await hook(conn, lane, is_tenants=True) for _ in range(3)]
    await outbox.write(conn, [event(f"old-{number}", lane) for number in range(10)])
    assert len(await deliveries.claim(conn, await later(conn), 64, STEADY)) == PLACES
    assert not await deliveries.any_due(conn, await later(conn))
    operators = await hook(conn, lane)
    await outbox.write(conn, [event(f"new-{number}", lane) for number in range(3)])
    now = await later(conn)
    assert await deliveries.any_due(conn, now)
    claimed = await deliveries.claim(conn, now, 64, STEADY)
    assert [(one.webhook_id, one.is_tenants) for one in claimed] == [(operators, False)] * PLACES
    assert not await deliveries.any_due(conn, now)
    for one in claimed:
        await deliveries.delivered(conn, one, now)
    [last] = await deliveries.claim(conn, now, 64, STEADY)
    assert last.webhook_id == operators
    assert last.webhook_id not in own


async def test_with_little_room_lanes_take_turns(conn):
    """Old rows of many do not keep a newcomer out."""
    lanes = [await tenant(conn, str(n)) for n in range(4)]
    for lane in lanes:
        await fill(conn, lane, range(5))
    now, served = await later(conn), set()
    for turn in range(4):
        [one] = await deliveries.claim(conn, now + turn, 1, STEADY)
        served.add(one.event_id.rpartition("-")[0])
        await deliveries.failed(conn, one, "timeout", now + turn)
    assert served == set(lanes)


async def test_lanes_behind_those_that_took_all_room_are_next(conn):
    """Each claim noted a turn of every lane that it had looked at, and those at the end of the ids never had one."""
    lanes = [await tenant(conn, str(n)) for n in range(8)]
    for lane in lanes:
        await fill(conn, lane, range(6))
    now, served = await later(conn), set()
    for turn in range(2):
        claimed = await deliveries.claim(conn, now + turn, 8, STEADY)
        served |= {one.lane for one in claimed}
        for one in claimed:
            await deliveries.delivered(conn, one, now + turn)
    assert served == set(lanes)


async def test_queues_that_are_shut_out_keep_nobody_waiting(conn):
    slow = [Queue(await tenant(conn, f"slow {n}"), False) for n in range(3)]
    for lane, _ in slow:
        await fill(conn, lane, range(3))
    now = await later(conn)
    assert not await deliveries.any_due(conn, now, slow)
    assert await deliveries.claim(conn, now, 64, STEADY, slow) == []
    await fill(conn, quick := await tenant(conn, "quick"), range(3))
    now = await later(conn)
    assert await deliveries.any_due(conn, now, slow)
    assert [one.lane for one in await deliveries.claim(conn, now, 64, STEADY, slow)] == [quick] * PLACES
    assert {one.queue for one in await deliveries.claim(conn, now, 64, STEADY, slow[:1])} == set(slow[1:])


@pytest.mark.parametrize("is_tenants", [True, False])
async def test_receivers_of_one_kind_that_are_shut_out_keep_none_of_the_other_kind_waiting(conn, is_tenants):
    lane = await tenant(conn)
    slow, quick = Queue(lane, is_tenants), Queue(lane, not is_tenants)
    for kind in (True, False):
        await hook(conn, lane, is_tenants=kind)
    await outbox.write(conn, [event(f"event-{number}", lane) for number in range(6)])
    now = await later(conn)
    assert await deliveries.any_due(conn, now, [slow])
    assert [one.queue for one in await deliveries.claim(conn, now, 64, STEADY, [slow])] == [quick] * PLACES
    assert not await deliveries.any_due(conn, now, [slow])
    assert [one.queue for one in await deliveries.claim(conn, now, 64, STEADY)] == [slow] * PLACES


async def test_twelve_tries_in_a_day_then_dead(conn):
    webhook_id = await fill(conn, await tenant(conn), ["x"])
    begun = now = await later(conn)
    tries = []
    while claimed := await deliveries.claim(conn, now, 64, STEADY):
        tries.append((now - begun) / 1000)
        is_dead = await deliveries.failed(conn, claimed[0], "status 500", now)
        due = await conn.scalar(select(Outbox.deliver_after_ms))
        assert not await deliveries.claim(conn, due - 1, 64, STEADY)
        now = due
    assert (len(tries), is_dead) == (MAX_TRIES, True)
    assert tries[:4] == [0, 5, 35, 155]
    assert 23.5 * 3600 < tries[-1] <= 24 * 3600
    counts = (await webhooks.get(conn, webhook_id)).counts
    assert (counts.dead, counts.pending, counts.last_error) == (1, 0, "status 500")


@pytest.mark.parametrize("attempt", range(1, MAX_TRIES + 1))
def test_jitter_takes_up_to_a_tenth_and_adds_nothing(attempt):
    longest = STEADY.delay_ms(attempt)
    assert Schedule(lambda: 1.0).delay_ms(attempt) == pytest.approx(longest * 0.9, abs=1)
    assert Schedule(lambda: 0.0, 0.5).delay_ms(attempt) == longest // 2


async def test_a_sender_that_died_has_had_its_try_and_a_late_one_changes_nothing(conn):
    await fill(conn, await tenant(conn), ["x"])
    now = await later(conn)
    [lost] = await deliveries.claim(conn, now, 64, STEADY)
    assert await deliveries.claim(conn, now + deliveries.CLAIM_MS - 1, 64, STEADY) == []
    [again] = await deliveries.claim(conn, now + deliveries.CLAIM_MS, 64, STEADY)
    assert (lost.attempt, again.attempt, again.event_id) == (1, 2, lost.event_id)
    await deliveries.delivered(conn, lost, now)
    assert await conn.scalar(select(Outbox.state)) == "pending"
    await deliveries.delivered(conn, again, now)
    assert await conn.scalar(select(Outbox.state)) == "delivered"


async def test_a_last_try_that_was_lost_is_dead(conn):
    await fill(conn, await tenant(conn), ["x"])
    now = await later(conn)
    await conn.execute(Outbox.__table__.update().values(attempts=MAX_TRIES - 1))
    await deliveries.claim(conn, now, 64, STEADY)
    await deliveries.tidy(conn, now)
    assert await conn.scalar(select(Outbox.state)) == "pending"
    await deliveries.tidy(conn, now + deliveries.CLAIM_MS)
    assert await conn.scalar(select(Outbox.state)) == "dead"


async def test_what_ended_is_kept_for_a_while(conn):
    mine = await tenant(conn)
    await fill(conn, mine, range(2))
    now = await later(conn)
    good, bad = await deliveries.claim(conn, now, 64, STEADY)
    await deliveries.delivered(conn, good, now)
    await conn.execute(
        Outbox.__table__.update().where(Outbox.event_id == bad.event_id).values(state="dead", ended_at_ms=now)
    )
    for age, left in (
        (deliveries.DELIVERED_KEPT_MS, 2),
        (deliveries.DELIVERED_KEPT_MS + 1, 1),
        (deliveries.DEAD_KEPT_MS + 1, 0),
    ):
        await deliveries.purge(conn, now + age)
        assert await num_kept(conn) == left


async def test_a_receiver_that_lets_everything_pile_up_hears_nothing_new(conn, monkeypatch):
    monkeypatch.setattr(deliveries, "MAX_WAITING", 10)
    mine = await tenant(conn)
    webhook_id = await fill(conn, mine, range(11))
    await deliveries.tidy(conn, NOW)
    assert (await webhooks.get(conn, webhook_id)).is_full
    await outbox.write(conn, [event("more", mine)])
    assert await num_kept(conn) == 11
    some = select(Outbox.event_id).limit(6)
    await conn.execute(Outbox.__table__.delete().where(Outbox.event_id.in_(some)))
    await deliveries.tidy(conn, NOW)
    await outbox.write(conn, [event("more", mine)])
    assert await num_kept(conn) == 6


async def test_senders_at_once_share_the_work_and_the_two_places(db):
    async with db.write() as conn:
        lanes = [await tenant(conn, str(n)) for n in range(6)]
        for lane in lanes:
            await fill(conn, lane, range(8))
        now = await later(conn)

    async def one_claim():
        async with db.write() as conn:
            return await deliveries.claim(conn, now, 64, STEADY)

    claims = [one for many in await asyncio.gather(*(one_claim() for _ in range(8))) for one in many]
    names = [one.event_id for one in claims]
    assert len(names) == len(set(names))
    per_lane = {lane: sum(name.startswith(lane) for name in names) for lane in lanes}
    assert per_lane == dict.fromkeys(lanes, PLACES)


async def test_a_claim_in_progress_is_stepped_around_and_does_not_stop_the_writing(db):
    if db.dialect != "postgresql":
        pytest.skip("SQLite has one writer: claims queue")
    async with db.write() as conn:
        one, two = await tenant(conn, "one"), await tenant(conn, "two")
        await fill(conn, one, range(4))
        now = await later(conn)
    async with db.write() as holding:
        assert len(await deliveries.claim(holding, now, 64, STEADY)) == PLACES
        async with asyncio.timeout(stretched(5)), db.write() as other:
            await fill(other, two, ["new"])
            await outbox.write(other, [event("while claimed", one)])
            found = await deliveries.claim(other, await later(other), 64, STEADY)
        assert [claimed.event_id for claimed in found] == [f"{two}-new"]
