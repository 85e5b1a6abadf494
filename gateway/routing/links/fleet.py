"""The workers that this gateway is linked with. The fleet finds them in Redis, dials each, and dials lost ones again.

Redis only says where workers listen. While it cannot be reached, the links stay, and a lost link is dialled again at
the last known address.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from gateway.base.lifecycle import uninterrupted
from gateway.routing.links.quarantine import Quarantine
from gateway.routing.links.trust import LinkDown, LinkRefused, Trust
from gateway.routing.links.worker_link import WorkerLink, new_process_id
from gateway.routing.links.worker_records import KeepRecords
from workers.process.rounds import heed_cancellation, name_of, num_failed, within
from workers.protocol import registry
from workers.protocol.messages import Hello
from workers.protocol.registry import Registration

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
"""The time between two looks while each known worker is linked. One that registers is announced."""
SEARCH_EVERY_S = 0.5
"""The time between two looks while no worker is known, or one is not linked."""
REDIAL_S = 0.5
"""The time until a worker is dialled again that could not be reached."""
REFUSED_S = 5.0
"""The time until a worker is dialled again that this gateway does not trust, or that does not trust it, or whose link a
fault ended.
"""
LOST_S = 0.25
"""The time until a worker is dialled again whose link was up."""

Look = Callable[[], Awaitable[list[Registration] | None]]
"""Returns the registrations in force, or None while Redis does not answer."""


class Fleet:
    def __init__(
        self,
        look: Look,
        keep_records: KeepRecords,
        group_key: bytes = b"",
        quarantine: Quarantine | None = None,
        trust: Trust = Trust(),  # noqa: B008 - it is frozen
    ) -> None:
        self.quarantine = quarantine or Quarantine()
        self._group_key = group_key
        self._trust = trust
        self._look = look
        self._keep_records = keep_records
        self._process = new_process_id()
        self._known: dict[str, Registration] = {}
        self._links: dict[str, WorkerLink] = {}
        self._news = asyncio.Event()
        self.num_lost = 0
        """The number of links that were up and ended."""
        self.num_refused = 0
        """How often a worker was dialled, and one side refused the other."""
        self.refusals: dict[str, str] = {}
        """The registered workers for which that was so the last time, or whose link a fault ended, and why."""

    @property
    def links(self) -> list[WorkerLink]:
        return [link for link in self._links.values() if link.is_up]

    def hellos(self, model: str) -> list[Hello]:
        """Returns what the linked workers of a model have said of themselves."""
        links = self._links.values()
        return [link.hello for link in links if link.hello is not None and link.registration.model == model]

    @property
    def unreachable(self) -> list[Registration]:
        """The workers that are registered and not linked: they start, they are gone, or the network is cut."""
        linked = {link.registration.worker for link in self.links}
        return [self._known[name] for name in sorted(self._known.keys() - linked)]

    @property
    def refused(self) -> list[Registration]:
        """The workers that are registered and not linked because one side refused the other, or a fault ended the link."""
        return [one for one in self.unreachable if one.worker in self.refusals]

    def num_workers(self) -> dict[str, int]:
        return dict(Counter(link.registration.model for link in self.links))

    @property
    def draining(self) -> list[str]:
        """The linked workers that take nothing new."""
        return sorted(link.registration.worker for link in self.links if link.status.draining)

    def with_suspects(self) -> set[str]:
        """Returns the workers on which a suspect is in its first steps, or will be."""
        workers = {link.registration.worker: link.has_suspect for link in self.links}
        return {worker for worker, has_one in workers.items() if has_one or self.quarantine.is_reserved(worker)}

    def look_soon(self) -> None:
        """Looks at once, because a worker has registered or a link has ended."""
        self._news.set()

    async def finish_records(self) -> None:
        """Keeps what the workers still have to report of ended requests, for at most a second."""
        await asyncio.gather(*(link.records.finish() for link in self.links))

    async def run(self) -> None:
        """Runs until it is cancelled; the links end with it."""
        num_failed[name_of(self._serve)] += 0
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._news.clear()
                found = await self._look()
                heed_cancellation()
                if found is not None:
                    self._known = {registration.worker: registration for registration in found}
                    self.refusals = {name: why for name, why in self.refusals.items() if name in self._known}
                for registration in self._known.values():
                    link = self._links.get(registration.worker)
                    if link is not None and link.registration != registration and not link.is_up:
                        link.abort()  # what is dialled under a registration that is over may never be up
                    if registration.worker not in self._links:
                        link = WorkerLink(
                            registration,
                            self._process,
                            self._keep_records,
                            self._group_key,
                            self.quarantine,
                            self._trust,
                        )
                        self._links[registration.worker] = link
                        tasks.create_task(self._serve(link))
                is_whole = self._known and not self.unreachable
                await within(self._news, LOOK_EVERY_S if is_whole else SEARCH_EVERY_S)

    async def _serve(self, link: WorkerLink) -> None:
        try:
            await link.run()
            self.num_lost += 1
            self.refusals.pop(link.registration.worker, None)
            await asyncio.sleep(LOST_S)
        except LinkRefused as refused:
            self.num_refused += 1
            self._note(link.registration, str(refused))
            await asyncio.sleep(REFUSED_S)
        except LinkDown:
            self.refusals.pop(link.registration.worker, None)
            await asyncio.sleep(REDIAL_S)
        except Exception as fault:  # noqa: BLE001 - such as an address that is none: the other links go on
            num_failed[name_of(self._serve)] += 1
            self._note(link.registration, f"a fault ended its link: {type(fault).__name__}. The log says more", fault)
            await asyncio.sleep(REFUSED_S)
        finally:
            del self._links[link.registration.worker]
            self.look_soon()
            await uninterrupted(link.records.until_kept())  # the worker is dialled meanwhile

    def _note(self, registration: Registration, why: str, fault: Exception | None = None) -> None:
        """Notes why a worker is not linked. The log has each reason once, however often the worker is dialled."""
        if self.refusals.get(registration.worker) != why:
            self.refusals[registration.worker] = why
            said = {"worker": registration.worker, "address": registration.address, "why": why}
            if fault is None:
                logger.warning("worker_link_refused", extra=said)
            else:
                logger.error("worker_link_failed", exc_info=fault, extra=said)


def decode_all(values: list[bytes]) -> list[Registration]:
    """Decodes registrations. A value that cannot be read is no worker of ours and is skipped."""
    found = []
    for value in values:
        try:
            found.append(registry.decode(value))
        except msgspec.DecodeError:
            logger.warning("worker_registration_unreadable")
    return found
