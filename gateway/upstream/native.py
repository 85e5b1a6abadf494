"""A worker of our own: one multiplexed connection, heartbeats, and its events sorted to the calls they belong to.

Judges the worker by what it says on the link, never by Redis. Drops what is stale (another attempt, tokens already
seen) and ends an attempt in which tokens are missing. Knows no text, no client and no money.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Coroutine
from typing import Any

from gateway.lifecycle import uninterrupted
from gateway.upstream.base import Event, Lost, Mailbox
from workers.protocol import registry
from workers.protocol.connection import HEARTBEAT_S, Connection, dial
from workers.protocol.frames import FrameError
from workers.protocol.messages import (
    PROTOCOL_VERSION,
    Alive,
    Cancel,
    EngineAck,
    EngineRecords,
    ExtendLease,
    Failed,
    Finished,
    GenerateRequest,
    Hello,
    Message,
    StepFrame,
    TokenDelta,
    WorkerStatus,
)

logger = logging.getLogger(__name__)

HELLO_S = 3.0
MAX_QUEUED_BYTES = 64 * 1024 * 1024
SUSPECT_STEP_AGE_MS = 3_000
"""No new work for an engine whose running step is older (security.md F27)."""
STUCK_STEP_AGE_MS = 15_000
"""Such an engine is given up; its supervisor kills it at the same age."""

KeepRecords = Callable[[EngineRecords], Coroutine[Any, Any, EngineAck]]
"""Commits a worker's records to SQL, however long that takes."""


class LinkDown(Exception):
    """The worker cannot be spoken to."""


class NativeCall:
    def __init__(
        self, link: WorkerLink, request: GenerateRequest, mailbox: Mailbox, number: int
    ) -> None:
        self.worker = link.registration.worker
        self._link = link
        self._request = request
        self._mailbox = mailbox
        self._number = number
        self._num_tokens = [0] * request.num_choices
        self._lease_seq = request.lease_seq

    @property
    def key(self) -> tuple[str, int]:
        return self._request.request_id, self._request.attempt

    def extend(self, bound: int, *, last: bool = False, wait_ms: int = 0) -> None:
        """Each message has a number of its own on the wire, so a repeated bound restarts the parking clock."""
        self._lease_seq += 1
        self._link.send(
            ExtendLease(
                self._request.request_id, self._lease_seq, bound, last=last, wait_ms=wait_ms
            )
        )

    def cancel(self, index: int = -1, reason: str = "client") -> None:
        self._link.send(Cancel(self._request.request_id, index, reason))

    def close(self) -> None:
        self._link.forget(self)

    def deliver(self, event: Event) -> None:
        if isinstance(event, TokenDelta):
            self._deliver_delta(event)
            return
        self.close()
        self._mailbox.put(self._number, event)

    def _deliver_delta(self, delta: TokenDelta) -> None:
        if not 0 <= delta.index < len(self._num_tokens):
            self._broken("a choice that was not asked for")
            return
        expected = self._num_tokens[delta.index]
        if delta.seq_no < expected:
            return  # seen already
        if delta.seq_no > expected:
            self._broken("missing tokens")
            return
        self._num_tokens[delta.index] += len(delta.tokens)
        self._mailbox.put(self._number, delta)

    def _broken(self, why: str) -> None:
        self.cancel(reason="broken")
        self.deliver(Lost(why))


class WorkerLink:
    """From the dialling to the end of one connection."""

    def __init__(
        self, registration: registry.Registration, process: str, keep_records: KeepRecords
    ) -> None:
        self.registration = registration
        self.hello: Hello | None = None
        self.status = WorkerStatus()
        self.num_unreported = 0
        """Calls sent since the worker's last status."""
        self._process = process
        self._keep_records = keep_records
        self._connection: Connection | None = None
        self._calls: dict[tuple[str, int], NativeCall] = {}
        self._records: asyncio.Queue[EngineRecords] = asyncio.Queue(64)

    @property
    def is_up(self) -> bool:
        return self.hello is not None

    @property
    def takes_work(self) -> bool:
        suspect = self.status.last_step_age_ms > SUSPECT_STEP_AGE_MS
        return self.is_up and not self.status.draining and not suspect

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    @property
    def load(self) -> int:
        return max(self.status.running + self.status.waiting + self.num_unreported, self.num_calls)

    def start_call(self, request: GenerateRequest, mailbox: Mailbox, number: int) -> NativeCall:
        """Raises `LinkDown`, and `FrameError` for a request that fits no frame."""
        if not self.is_up:
            raise LinkDown
        call = NativeCall(self, request, mailbox, number)
        self.send(request)
        self._calls[call.key] = call
        self.num_unreported += 1
        return call

    def send(self, message: Message) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def forget(self, call: NativeCall) -> None:
        self._calls.pop(call.key, None)

    async def run(self) -> None:
        """Dials and serves until the link is lost; every open call then gets `Lost`. Raises `LinkDown` if the
        worker could not be reached at all."""
        try:
            async with asyncio.timeout(HELLO_S):
                self._connection = await dial(self.registration.address)
        except (OSError, TimeoutError):
            raise LinkDown from None
        try:
            async with asyncio.TaskGroup() as tasks:
                beats = tasks.create_task(self._beat(self._connection))
                shipping = tasks.create_task(self._ship_records())
                await self._listen(self._connection)
                beats.cancel()
                shipping.cancel()
        finally:
            self._connection.abort()
            self._connection = None
            self.hello = None
            for call in list(self._calls.values()):
                call.deliver(Lost("the worker was lost"))

    async def _beat(self, connection: Connection) -> None:
        connection.send(Hello(PROTOCOL_VERSION, self._process))
        while True:
            connection.send(Alive())
            if connection.num_queued_bytes > MAX_QUEUED_BYTES:
                connection.abort()
            await asyncio.sleep(HEARTBEAT_S)

    async def _listen(self, connection: Connection) -> None:
        try:
            async for messages in connection:
                for message in messages:
                    self._on_message(message)
        except FrameError as error:
            logger.warning(
                "worker_sent_garbage", extra={"worker": self.registration.worker, "why": str(error)}
            )
        logger.info("worker_link_lost", extra={"worker": self.registration.worker})

    def _on_message(self, message: Message) -> None:
        match message:
            case StepFrame():
                for delta in message.deltas:
                    self._to_call(delta)
            case Finished() | Failed():
                self._to_call(message)
            case WorkerStatus():
                self.status = message
                self.num_unreported = 0
                if (
                    self.status.last_step_age_ms > STUCK_STEP_AGE_MS
                    and self._connection is not None
                ):
                    logger.warning("worker_stuck", extra={"worker": self.registration.worker})
                    self._connection.abort()
            case Hello():
                self._on_hello(message)
            case EngineRecords():
                self._on_records(message)
            case _:
                pass  # messages of a newer protocol, and cache events until the router wants them

    def _to_call(self, event: TokenDelta | Finished | Failed) -> None:
        call = self._calls.get((event.request_id, event.attempt))
        if call is not None:
            call.deliver(event)

    def _on_hello(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION or hello.model != self.registration.model:
            logger.warning(
                "worker_not_usable",
                extra={"worker": self.registration.worker, "model": hello.model},
            )
            return
        self.hello = hello
        logger.info(
            "worker_link_up", extra={"worker": self.registration.worker, "model": hello.model}
        )

    def _on_records(self, records: EngineRecords) -> None:
        try:
            self._records.put_nowait(records)
        except asyncio.QueueFull:
            pass  # the worker keeps what was not acknowledged and sends it again

    async def _ship_records(self) -> None:
        while True:
            self.send(await uninterrupted(self._keep_records(await self._records.get())))


def new_process_id() -> str:
    return uuid.uuid4().hex
