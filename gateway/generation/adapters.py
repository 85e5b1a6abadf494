"""Adapters in a gateway: what is registered, and every linked worker brought to it, again and again.

A worker is told to load what is registered and to let go what was deleted; anything else it has is its own business.
Every gateway says the same, and commands are idempotent, so none of them leads.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from aiohttp import web

from accounting.tenants.adapters import AdapterInfo
from gateway.generation.models import Models
from gateway.routing.upstream.native import WorkerLink
from workers.protocol.messages import AdapterCommand, AdapterState

logger = logging.getLogger(__name__)

RETRY_S = 15.0
"""A load that failed, or of which nothing was heard, is asked for again."""


class AdapterKeeper:
    def __init__(self, models: Models) -> None:
        self._models = models
        self._infos: list[AdapterInfo] = []
        self._links: dict[str, WorkerLink] = {}
        self._told: dict[tuple[int, str], float] = {}
        """(link, adapter) → when it was last told to load it."""

    def replace(self, infos: Sequence[AdapterInfo]) -> None:
        """All that are known to SQL, ended ones included."""
        self._infos = list(infos)
        self._models.serve_adapters([info for info in infos if info.deleted_at is None])

    def states(self, info: AdapterInfo) -> dict[str, AdapterState]:
        """By worker, of the linked ones that serve its model."""
        waiting = AdapterState(info.id, "loading")
        return {
            name: link.adapters.get(info.id, waiting)
            for name, link in self._links.items()
            if link.registration.model == info.model
        }

    def look(self, links: Sequence[WorkerLink]) -> None:
        """Sends what is due; called again and again."""
        self._links = {link.registration.worker: link for link in links}
        alive = {id(link) for link in links}
        self._told = {key: at for key, at in self._told.items() if key[0] in alive}
        now = time.monotonic()
        for link in links:
            if link.hello is None or not link.hello.adapters:
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
