"""When a gateway looks for workers, and when it dials one again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest

from gateway.routing.links import fleet as fleets
from gateway.routing.links.fleet import Fleet
from gateway.routing.links.trust import Trust
from workers.process.rounds import num_failed
from workers.protocol.counts import EngineAck, EngineRecords
from workers.protocol.registry import Registration

ONE = Registration("worker-0", "process", "unix:/none", "model", "root", 1)


class Link:
    """A link that is up until the test ends it."""

    made: ClassVar[list[Link]] = []

    def __init__(self, registration: Registration, *_: object) -> None:
        self.registration, self.is_up, self.ended = registration, True, asyncio.Event()
        self.kept = asyncio.Event()
        self.records = self
        Link.made.append(self)

    def abort(self) -> None:
        self.ended.set()

    async def run(self) -> None:
        await self.ended.wait()
        self.is_up = False

    async def until_kept(self) -> None:
        await self.kept.wait()


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 - what is awaited has no event
        await asyncio.sleep(0)


@pytest.fixture
async def seen(monkeypatch):
    """A fleet that runs, which by itself would look a second time after an hour."""
    for name in ("LOOK_EVERY_S", "SEARCH_EVERY_S"):
        monkeypatch.setattr(fleets, name, 3600.0)
    monkeypatch.setattr(fleets, "LOST_S", 0.0)
    monkeypatch.setattr(fleets, "WorkerLink", Link)
    Link.made = []
    known: list[Registration] = []
    looks = asyncio.Semaphore(0)

    async def look() -> list[Registration]:
        looks.release()
        return list(known)

    fleet = Fleet(look, lambda *_: None)
    task = asyncio.create_task(fleet.run())
    async with asyncio.timeout(30):
        yield SimpleNamespace(fleet=fleet, known=known, looks=looks)
    task.cancel()
    for link in Link.made:
        link.kept.set()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_worker_that_registers_is_linked_at_once(seen):
    await seen.looks.acquire()
    assert Link.made == []
    seen.known.append(ONE)
    seen.fleet.look_soon()
    await seen.looks.acquire()
    await asyncio.sleep(0)
    assert [link.registration for link in seen.fleet.links] == [ONE]


async def test_a_worker_whose_link_ends_is_dialled_again_without_a_look_being_due(seen):
    seen.known.append(ONE)
    seen.fleet.look_soon()
    await until(lambda: len(Link.made) == 1)
    Link.made[0].ended.set()
    await until(lambda: len(Link.made) == 2)
    assert (len(seen.fleet.links), seen.fleet.num_lost) == (1, 1)
    assert not Link.made[0].kept.is_set(), "SQL may be away: its records are waited for meanwhile"


@pytest.mark.parametrize("address", ["tcp:127.0.0.1:70000", f"tcp:{'a' * 64}.org:7000", "tcp:nowhere"])
async def test_a_registration_that_cannot_be_dialled_costs_no_other_worker_its_link(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleets, "REFUSED_S", 0.0)
    monkeypatch.setattr(fleets, "SEARCH_EVERY_S", 0.01)
    broken = msgspec.structs.replace(ONE, worker="worker-1", address=address)
    registered, made = [ONE, broken], fleets.WorkerLink
    links: list[Link] = []

    def link(registration: Registration, *more: object) -> object:
        if registration is broken:
            return made(registration, *more)  # type: ignore[arg-type] - handed on as they came
        links.append(Link(registration))
        return links[-1]

    async def look() -> list[Registration]:
        return registered

    monkeypatch.setattr(fleets, "WorkerLink", link)
    before = num_failed["Fleet._serve"]
    fleet = Fleet(look, keep, trust=Trust(may_be_plain=True))
    task = asyncio.create_task(fleet.run())
    async with asyncio.timeout(30):
        await until(lambda: num_failed["Fleet._serve"] >= before + 3)
        assert fleet.links == links == [links[0]]
        assert [*fleet.refusals] == ["worker-1"]
        registered = [ONE]
        await until(lambda: not fleet.refusals)
    task.cancel()
    links[0].kept.set()
    await asyncio.gather(task, return_exceptions=True)
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["worker_link_failed"]
    assert fleet.num_refused == 0


async def keep(records: EngineRecords) -> EngineAck:
    return EngineAck(records.worker, records.records[-1].seq)


@pytest.mark.parametrize("is_up", [False, True])
async def test_a_worker_that_registered_anew_before_its_link_was_up_is_dialled_anew(seen, is_up):
    """It said another model than its old registration, and was not used until the gateway was started again."""
    seen.known.append(ONE)
    seen.fleet.look_soon()
    await until(lambda: len(Link.made) == 1)
    Link.made[0].is_up = is_up
    seen.known[:] = [msgspec.structs.replace(ONE, process="other", model="another")]
    while seen.looks.locked() is False:
        await seen.looks.acquire()
    seen.fleet.look_soon()
    await seen.looks.acquire()
    for _ in range(100):
        await asyncio.sleep(0)
    models = [link.registration.model for link in Link.made]
    assert models == (["model"] if is_up else ["model", "another"])


@pytest.mark.parametrize("is_linked", [True, False])
async def test_it_looks_seldom_only_while_each_known_worker_is_linked(seen, is_linked, monkeypatch):
    """Without a worker, or with one that is registered and not linked, it searches."""
    monkeypatch.setattr(fleets, "SEARCH_EVERY_S", 0.0)
    if is_linked:
        seen.known.append(ONE)
    seen.fleet.look_soon()
    if is_linked:
        await until(lambda: len(seen.fleet.links) == 1)
    for _ in range(100):
        await asyncio.sleep(0)
    num_looks = 0
    while not seen.looks.locked():
        await seen.looks.acquire()
        num_looks += 1
    assert (num_looks > 10) != is_linked
