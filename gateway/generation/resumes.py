"""The requests of one HTTP request whose workers were lost, while they look for others that go on with them.

Each gets a task that waits for a worker with the same weights. What comes of it is told by the mailbox: the next tokens,
or the failure of all.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from gateway.base import errors
from gateway.generation.capacity import Capacity
from gateway.generation.generation import Generation
from gateway.routing.links.link import Mailbox
from gateway.routing.router import Prompt
from gateway.telemetry.record import RequestRecord

logger = logging.getLogger(__name__)

REFUSALS = ("overloaded", "disk_full")
"""Codes with which a worker refuses a request that came from a lost one. Another, or the same one later, may take it."""
REFUSED_S = 1.0
"""The time until a refused request is sent again."""


class Resumes:
    def __init__(self, capacity: Capacity, record: RequestRecord, mailbox: Mailbox) -> None:
        self.failed: Generation | None = None
        """The first one that no other worker went on with."""
        self._capacity = capacity
        self._record = record
        self._mailbox = mailbox
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, generation: Generation, prompt: Prompt, error: errors.ApiError) -> errors.ApiError | None:
        """Looks for another worker after this error if one may go on. Returns the error that ends the request instead."""
        if not self._capacity.resume_s or generation.order.is_bought:
            return error
        is_refused = generation.num_resumes > 0 and error.code in REFUSALS
        if error.code != "upstream_lost" and not is_refused:
            return error
        if is_refused and generation.stranded_s > self._capacity.resume_s:
            return error
        try:
            generation.strand()
        except errors.ApiError as end:
            return end
        if not generation.has_final:
            task = asyncio.create_task(self._resume(generation, prompt, error, REFUSED_S if is_refused else 0.0))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return None

    def stop(self) -> None:
        """Ends all looking: nobody waits for the answer any more."""
        for task in self._tasks:
            task.cancel()

    async def _resume(self, generation: Generation, prompt: Prompt, lost: errors.ApiError, pause_s: float) -> None:
        """Sends a request to another worker as soon as there is one. If none comes in time, all fail with `lost`."""
        counts = self._capacity.router.counts.resumes
        root = generation.admitted.root
        try:
            pick = await self._capacity.resume(generation.order, prompt, root, generation.resume, pause_s)
        except TimeoutError:
            failure = lost
        except errors.ApiError as error:
            failure = error
        except Exception:  # a fault of ours must not leave the client without an end
            logger.exception("request_not_resumed", extra={"request_id": generation.order.facts.request_id})
            failure = errors.internal()
        else:
            counts["resumed"] += 1
            self._record.mark("moved")
            self._record.worker = pick.link.registration.worker
            return
        counts["failed"] += 1
        self.failed = self.failed or generation
        self._mailbox.fail(replace(failure))  # a copy: this frame holds the error, whose traceback holds the frame
