"""Adapters in a gateway: the registered adapters, and the commands that bring every linked worker into line with them.

A worker is asked to load registered adapters and to unload deleted ones; its other adapters are left alone. Every
gateway sends the same commands, and commands are idempotent, so no gateway leads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from aiohttp import web

from accounting.tenants.adapters import AdapterInfo
from gateway.generation.served.models import Models
from gateway.routing.links.worker_link import WorkerLink
from workers.protocol.messages import AdapterCommand
from workers.protocol.reports import AdapterState

logger = logging.getLogger(__name__)

RETRY_S = 15.0
"""A load that failed, or that the worker has not reported on, is asked for again after this time."""


class AdapterKeeper:
    def __init__(self, models: Models) -> None:
        self._models = models
        self._infos: list[AdapterInfo] = []
        self._links: dict[str, WorkerLink] = {}
        self._told: dict[tuple[int, str], float] = {}
        """(link, adapter) → the time of the last command to load it."""

    def replace(self, infos: Sequence[AdapterInfo]) -> None:
        """Takes all adapters that SQL knows, deleted ones included."""
        self._infos = list(infos)
        self._models.serve_adapters([info for info in infos if info.deleted_at is None])

    def states(self, info: AdapterInfo) -> dict[str, AdapterState]:
        """Returns the adapter's state by worker, for the linked workers that serve its model."""
        waiting = AdapterState(info.id, "loading")
        return {
            name: link.adapters.get(info.id, waiting)
            for name, link in self._links.items()
            if link.registration.model == info.model
        }

    def look(self, links: Sequence[WorkerLink]) -> None:
        """Sends the commands that are due. The caller repeats this call."""
        self._links = {link.registration.worker: link for link in links}
        alive = {id(link) for link in links}
        self._told = {key: at for key, at in self._told.items() if key[0] in alive}
        now = time.monotonic()
        for link in links:
            if link.hello is None:
                continue
            for info in self._infos:
                if info.model == link.registration.model:
                    self._settle(link, info, now)

    def _settle(self, link: WorkerLink, info: AdapterInfo, now: float) -> None:
        state = link.adapters.get(info.id)
        if info.deleted_at is not None:
            if state is not None and state.state in ("loaded", "failed"):
                link.send(AdapterCommand("unload", info.id))
            return
        if state is not None and state.state != "failed":
            return
        told = self._told.get((id(link), info.id))
        if told is None or now - told >= RETRY_S:
            self._told[id(link), info.id] = now
            link.send(AdapterCommand("load", info.id, info.path))
            logger.info("adapter_asked_for", extra={"adapter": info.id, "worker": link.registration.worker})


ADAPTERS = web.AppKey("adapters", AdapterKeeper)
