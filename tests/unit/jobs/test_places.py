"""Which tries of webhooks may begin while some receivers hang."""

from __future__ import annotations

from collections import deque

from accounting.events.deliveries import Queue
from workers.jobs.webhooks.places import AT_ONCE, HELD, HELD_BY_SLOW, LATELY_S, SLOW_S, Places, Try


def own(tenant: str) -> Queue:
    return Queue(tenant, True)


def ended(places: Places, one: Try, now: float) -> None:
    places.answered(one, now)
    places.end(one)


def test_so_many_begin_at_once_and_those_that_hang_make_room() -> None:
    places = Places()
    tries = [places.begin(own(f"hangs_{n // 2}"), 0.0) for n in range(AT_ONCE)]
    assert places.room(0.5) == 0
    assert places.room(2 * SLOW_S) == AT_ONCE
    for one in tries:
        ended(places, one, 5.0)
    assert places.room(5.0) == AT_ONCE


def test_tenants_that_were_slow_lately_leave_places_to_others_however_many_they_are() -> None:
    """A thousand whose receivers hang for 5 s, served in turns: each has always two more to send."""
    places, running, turns = Places(), [], deque(own(f"hangs_{n}") for n in range(1000))
    room_left = []
    for now in range(300):
        for one in [one for one in running if now - one.began >= 5]:
            running.remove(one)
            ended(places, one, now)
        shut_out, room = places.shut_out(now), places.room(now)
        waiting = [queue for queue in turns if queue not in shut_out][: max(room, 0) // 2]
        for queue in waiting:
            running += [places.begin(queue, now), places.begin(queue, now)]
            turns.remove(queue)
            turns.append(queue)
        assert len(running) <= HELD
        room_left.append(places.room(now + SLOW_S))
    all_known = 60
    assert min(room_left[:all_known]) == 0
    assert min(room_left[all_known:]) >= AT_ONCE // 2


def test_a_tenant_is_slow_for_a_while_and_alone_it_is_not_shut_out() -> None:
    places = Places()
    ended(places, places.begin(own("once"), 0.0), 5.0)
    assert not places.shut_out(6.0)
    hanging = [places.begin(own(f"hangs_{n // 2}"), 6.0) for n in range(HELD_BY_SLOW)]
    assert own("once") in places.shut_out(8.0)
    assert own("quick") not in places.shut_out(8.0)
    ended(places, hanging.pop(), 8.0)
    assert not places.shut_out(8.0)
    hanging.append(places.begin(own("hangs_1"), 5.0 + LATELY_S))
    assert own("once") not in places.shut_out(6.0 + LATELY_S)


def test_a_tenant_is_not_slow_for_what_writing_down_takes() -> None:
    places = Places()
    written = [places.begin(own(f"quick_{n // 2}"), 0.0) for n in range(HELD_BY_SLOW)]
    for one in written:
        places.answered(one, 0.1)
    assert not places.shut_out(5.0)
    hanging = [places.begin(own(f"hangs_{n // 2}"), 5.0) for n in range(HELD_BY_SLOW)]
    assert places.shut_out(7.0) == {one.queue for one in hanging}


def test_receivers_of_one_kind_that_hang_shut_out_none_of_the_other_kind() -> None:
    places = Places()
    hanging = [places.begin(own(f"tenant_{n // 2}"), 0.0) for n in range(HELD_BY_SLOW)]
    assert places.shut_out(2.0) == {one.queue for one in hanging}
    assert Queue("tenant_0", False) not in places.shut_out(2.0)
