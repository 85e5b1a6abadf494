"""Public prefixes in a gateway: the part of a prompt that lies in the public region, and the filling of that region on
each worker.

A tenant never writes to the public region. The operator's own prefill does, pinned, on every linked worker. So all
tenants always find it, and a hit reveals nothing about anybody (architecture.md decision 5). It knows ids, not text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from aiohttp import web

from accounting.tenants.prefixes import PrefixInfo
from accounting.values.types import OPERATOR_TENANT, Principal, RequestFacts
from cache.tree.hashing import region_id
from gateway.base import ids
from gateway.base.errors import ApiError
from gateway.base.lifecycle import report_end
from gateway.generation.engine_request import EngineRequest
from gateway.generation.generation import Generation
from gateway.generation.served.models import Models
from gateway.metering.admission import Admission
from gateway.routing.links.link import Lost, Mailbox
from gateway.routing.links.worker_link import WorkerLink
from gateway.text.choice import TextRules
from workers.protocol.messages import CacheCommand, Failed, Finished, Region, SamplingParams

logger = logging.getLogger(__name__)

FILL_S = 60.0
RETRY_S = 5.0

State = Literal["filling", "pinned", "failed"]

_OPERATOR = Principal(kind="operator", tenant_id=OPERATOR_TENANT, key_id="", scopes=frozenset())


@dataclass(frozen=True, slots=True)
class Fill:
    """One prefix on one worker."""

    state: State
    num_tokens: int = 0
    """The number of tokens pinned on the worker, in whole blocks."""
    reason: str = ""


class PublicPrefixes:
    """The public prefixes in force, by model. Requests are answered from memory."""

    def __init__(self, cache_secret: bytes) -> None:
        self.region = region_id(cache_secret, b"public")
        self._by_model: dict[str, list[tuple[list[int], PrefixInfo]]] = {}

    def replace(self, infos: Sequence[PrefixInfo]) -> None:
        by_model: dict[str, list[tuple[list[int], PrefixInfo]]] = {}
        for info in infos:
            by_model.setdefault(info.model, []).append((list(info.tokens), info))
        for found in by_model.values():
            found.sort(key=lambda entry: -len(entry[0]))
        self._by_model = by_model

    def of(self, model: str) -> list[PrefixInfo]:
        now = time.time()
        return [info for _, info in self._by_model.get(model, ()) if _lives(info, now)]

    def path(self, model: str, prompt: Sequence[int], own: tuple[Region, ...]) -> tuple[Region, ...]:
        """Returns `own`, preceded by the public region if the prompt begins with a registered prefix (the longest
        counts).
        """
        entries = self._by_model.get(model)
        if not entries:
            return own
        now, start = time.time(), list(prompt[: len(entries[0][0])])
        for tokens, info in entries:
            if start[: len(tokens)] == tokens and _lives(info, now):
                return (Region(self.region, len(tokens)), *own)
        return own


@dataclass
class _OnWorker:
    """The work that this gateway has done for one link; a new link begins anew."""

    link: WorkerLink
    fills: dict[str, Fill] = field(default_factory=dict)
    retry_at: dict[str, float] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class Filler:
    """Keeps every worker's public region equal to the registered prefixes."""

    def __init__(self, prefixes: PublicPrefixes, admission: Admission, models: Models) -> None:
        self._prefixes = prefixes
        self._admission = admission
        self._models = models
        self._workers: dict[str, _OnWorker] = {}

    def states(self, prefix_id: str) -> dict[str, Fill]:
        """Returns the prefix's fill by worker, for the linked workers that serve its model."""
        return {name: worker.fills[prefix_id] for name, worker in self._workers.items() if prefix_id in worker.fills}

    def look(self, links: Sequence[WorkerLink]) -> None:
        """Starts the fills that are due. The caller repeats this call."""
        by_name = {link.registration.worker: link for link in links}
        for name in [name for name, at in self._workers.items() if by_name.get(name) is not at.link]:
            self._stop(self._workers.pop(name))
        for name, link in by_name.items():
            worker = self._workers.setdefault(name, _OnWorker(link))
            if worker.task is None or worker.task.done():
                self._advance(worker)

    def close(self) -> None:
        for worker in self._workers.values():
            self._stop(worker)

    def _advance(self, worker: _OnWorker) -> None:
        wanted = {info.id: info for info in self._prefixes.of(worker.link.registration.model)}
        if worker.fills.keys() - wanted.keys():
            # A command lifts the pins of the whole region. Prefixes that are still wanted are pinned again; their KV is
            # found where it lies.
            worker.link.send(CacheCommand("unpin", self._prefixes.region))
            worker.fills.clear()
            worker.retry_at.clear()
        now = time.monotonic()
        due = [
            info
            for info in wanted.values()
            if info.id not in worker.fills or worker.retry_at.get(info.id, now + 1) <= now
        ]
        if due and worker.link.takes_work:
            for info in due:
                worker.fills[info.id] = Fill("filling")
            worker.task = asyncio.create_task(self._fill_all(worker, due))
            report_end(worker.task)

    async def _fill_all(self, worker: _OnWorker, due: Sequence[PrefixInfo]) -> None:
        """Fills shorter prefixes first, because a longer one continues where they end."""
        for info in sorted(due, key=lambda info: len(info.tokens)):
            try:
                async with asyncio.timeout(FILL_S):
                    fill = await self._fill(worker.link, info)
            except ApiError as error:
                fill = Fill("failed", reason=error.message)
            except TimeoutError:
                fill = Fill("failed", reason="The worker did not answer in time.")
            worker.fills[info.id] = fill
            worker.retry_at.pop(info.id, None)
            if fill.state == "failed":
                worker.retry_at[info.id] = time.monotonic() + RETRY_S
            logger.info(
                "public_prefix",
                extra={
                    "prefix": info.id,
                    "worker": worker.link.registration.worker,
                    "state": fill.state,
                    "num_tokens": fill.num_tokens,
                    "why": fill.reason,
                },
            )

    async def _fill(self, link: WorkerLink, info: PrefixInfo) -> Fill:
        """Runs a prefill as the operator, metered like any request."""
        assert link.hello is not None
        model = self._models.base(info.model)
        facts = RequestFacts(
            request_id=ids.request_id(),
            tenant_id=_OPERATOR.tenant_id,
            key_id=_OPERATOR.key_id,
            model=model.id,
            tier="interactive",
            prompt_tokens=len(info.tokens),
        )
        order = EngineRequest(
            facts=facts,
            principal=_OPERATOR,
            model=model,
            prompt=array("i", info.tokens),
            sampling=SamplingParams(seed=0, temperature=0.0),
            num_choices=1,
            max_tokens=0,
            rules=TextRules(),
            namespace=(Region(self._prefixes.region),),
            pinned=True,
        )
        mailbox = Mailbox()
        admitted = await self._admission.admit(order.ask(), link.hello.root)
        generation = Generation(order, admitted, mailbox, 0)
        try:
            generation.dispatch(link)
            final = await _final(mailbox)
            generation.note(final)
        except BaseException:
            generation.begin_abort()
            self._admission.endings.detach(generation.abandon("internal"))
            raise
        finally:
            generation.close()
        if not isinstance(final, Finished):
            await generation.abandon("worker_lost")
            why = final.message if isinstance(final, Failed) else final.why
            return Fill("failed", reason=f"The worker did not compute it: {why}")
        await generation.end(generation.posting())
        num_tokens = final.cache.num_pinned_blocks * link.hello.block_size
        if not num_tokens:
            return Fill("failed", reason="The worker's pins have no room for it.")
        return Fill("pinned", num_tokens)

    @staticmethod
    def _stop(worker: _OnWorker) -> None:
        if worker.task is not None:
            worker.task.cancel()


async def _final(mailbox: Mailbox) -> Finished | Failed | Lost:
    while True:
        for _, event in await mailbox.take():
            if isinstance(event, Finished | Failed | Lost):
                return event


def _lives(info: PrefixInfo, now: float) -> bool:
    return info.expires_at is None or now < info.expires_at


PREFIXES = web.AppKey("prefixes", PublicPrefixes)
FILLER = web.AppKey("filler", Filler)
