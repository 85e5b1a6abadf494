"""The link to a worker of our own: one multiplexed connection, heartbeats, and events sorted to their calls.

It judges the worker by the messages on the link, never by Redis. It drops stale events (another attempt, tokens already
seen) and ends an attempt in which tokens are missing. It knows no text, no client and no money.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
import uuid
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from accounting.values.types import BoughtAttempt
from gateway.routing.links.cache_view import CacheView
from gateway.routing.links.link import Lost, Mailbox, reads
from gateway.routing.links.quarantine import FIRST_TOKENS, Quarantine, fingerprint
from gateway.routing.links.trust import LinkDown, LinkRefused, Trust
from gateway.routing.links.worker_records import KeepRecords, WorkerRecords
from workers.process.tls import listener
from workers.protocol import addresses, registry
from workers.protocol.connection import HEARTBEAT_S, Connection, dial
from workers.protocol.counts import EngineRecords, ResidencyReport
from workers.protocol.frames import FrameError
from workers.protocol.messages import (
    PROTOCOL_VERSION,
    Alive,
    CacheCommand,
    CacheEvent,
    CacheProbe,
    CacheProbed,
    Cancel,
    DrainCommand,
    ExtendLease,
    Failed,
    Finished,
    GenerateRequest,
    Hello,
    Message,
    Region,
    StepFrame,
    TokenDelta,
)
from workers.protocol.patience import patience
from workers.protocol.reports import AdapterReport, AdapterState, EngineReport, WorkerStatus

logger = logging.getLogger(__name__)

HELLO_S = 3.0
PROBE_S = 2.0
"""The longest wait for a cache probe; an engine answers between two steps."""
MAX_QUEUED_BYTES = 64 * 1024 * 1024
SUSPECT_STEP_AGE_MS = 3_000
"""An engine whose running step is older gets no new work (security.md F27)."""
ALONE_S = 10.0
"""The longest time for which a suspect keeps other suspects off its worker."""
SNAPSHOT_S = 3.0
"""How long a worker has for a snapshot of its cache before it is asked again."""
STUCK_STEP_AGE_MS = 15_000
"""The gateway cuts its link to an engine whose running step is older. `headgate up` restarts the process (`workers/process/heartbeat.py`)."""

ENDED_EARLY = "it ended the link before it said hello: if it refused this gateway's certificate, its log says why"
ENDED_EARLY_IN_PLAIN = (
    "it ended the link before it said hello: it may speak TLS, and HEADGATE_LINK_CA is not set for this gateway"
)

WorkerState = Literal["ready", "draining", "disk_full", "silent", "other_tokenizer"]
"""The state of a linked worker. `silent`: its engine has shown no step for some seconds. `other_tokenizer`: it would
take work, but means other tokens by the gateway's ids.
"""


class RequestQuarantined(Exception):
    """The request has ended workers before."""


class WorkerCall:
    bought: Sequence[BoughtAttempt] = ()
    num_reasoning: int | None = None
    is_suspect = False
    """Whether a worker ended under the same request before."""

    def __init__(self, link: WorkerLink, request: GenerateRequest, mailbox: Mailbox, number: int) -> None:
        self.worker = link.registration.worker
        self._link = link
        self._request = request
        self._mailbox = mailbox
        self._number = number
        pooling = request.pooling
        self._num_tokens = [0] * (request.num_choices if pooling is None else len(pooling.lengths))
        for index, output in request.resume:
            self._num_tokens[index] = len(output)
        self._first = [number + FIRST_TOKENS for number in self._num_tokens]
        """The numbers of tokens with which the choices are past their first steps here."""
        self._lease_seq = request.lease_seq
        self.sent_at = time.monotonic()

    @property
    def key(self) -> tuple[str, int]:
        return self._request.request_id, self._request.attempt

    @property
    def request(self) -> GenerateRequest:
        return self._request

    @property
    def is_in_first_steps(self) -> bool:
        return all(number < first for number, first in zip(self._num_tokens, self._first, strict=True))

    def extend(self, bound: int, *, last: bool = False, wait_ms: int = 0) -> None:
        """Extends the lease. Each message has its own number on the wire, so a repeated bound restarts the parking
        clock.
        """
        self._lease_seq += 1
        self._link.send(ExtendLease(self._request.request_id, self._lease_seq, bound, last=last, wait_ms=wait_ms))

    def cancel(self, index: int = -1, reason: str = "client") -> None:
        self._link.send(Cancel(self._request.request_id, index, reason))

    def close(self) -> None:
        self._link.forget(self)
        if self.is_suspect and not self.is_in_first_steps:
            self._link.clear(self)

    def deliver(self, event: Finished | Failed | Lost) -> None:
        """Delivers an end."""
        self.close()
        if self.is_suspect and isinstance(event, Finished) and event.reason not in ("cancelled", "lease"):
            self._link.clear(self)
        self._mailbox.put(self._number, event)

    def deliver_delta(self, delta: TokenDelta) -> None:
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
    """One connection to a worker, from dialling to its end."""

    def __init__(
        self,
        registration: registry.Registration,
        process: str,
        keep_records: KeepRecords,
        group_key: bytes = b"",
        quarantine: Quarantine | None = None,
        trust: Trust = Trust(),  # noqa: B008 - it is frozen
    ) -> None:
        """A `group_key` that is not empty makes the link ask the worker what its cache holds."""
        self.registration = registration
        self.hello: Hello | None = None
        self.status = WorkerStatus()
        self.report = EngineReport()
        """The worker's last report for its operator. It stays empty for a version that reports nothing."""
        self.cached = CacheView()
        self.adapters: dict[str, AdapterState] = {}
        """The adapters by name, as the worker last reported them."""
        self._group_key = group_key
        self._quarantine = quarantine or Quarantine()
        self._trust = trust
        self._was_heard = False
        self._refused = ""
        """Why this gateway has refused the worker's hello."""
        self._is_well = False
        """The engine has stepped, or had nothing to do, since the link is up."""
        self._asked_at = 0.0
        self._unreported: dict[tuple[str, int], int] = {}
        """Calls sent since the worker's last status → how many of their tokens wait for a prefill."""
        self._num_promised = 0
        self._num_promised_tokens = 0
        self._process = process
        self.records = WorkerRecords(registration.worker, keep_records, self.send)
        self._connection: Connection | None = None
        self._calls: dict[tuple[str, int], WorkerCall] = {}
        self._probes: dict[int, asyncio.Future[CacheProbed]] = {}
        self._num_probes = 0

    @property
    def is_up(self) -> bool:
        return self.hello is not None

    @property
    def takes_work(self) -> bool:
        suspect = self.status.last_step_age_ms > SUSPECT_STEP_AGE_MS
        told_to_wait = self.status.draining or self.status.disk_full
        return self.is_up and not told_to_wait and not suspect

    @property
    def is_silent(self) -> bool:
        """Whether the worker has not been heard for longer than its beats are apart: it may hang, or be lost."""
        return self._connection is not None and self._connection.is_silent

    def state(self, vocabulary: str) -> WorkerState:
        """Returns the state as a gateway with this vocabulary of its model sees it."""
        if self.takes_work:
            return "ready" if reads(self, vocabulary) else "other_tokenizer"
        if self.status.draining:
            return "draining"
        return "disk_full" if self.status.disk_full else "silent"

    @property
    def num_calls(self) -> int:
        return len(self._calls)

    def has_adapter(self, name: str) -> bool:
        known = self.adapters.get(name)
        return known is not None and known.state == "loaded"

    @property
    def num_unreported_tokens(self) -> int:
        """The number of prompt tokens sent, or about to be, that the worker's last status does not count."""
        return sum(self._unreported.values()) + self._num_promised_tokens

    @property
    def load(self) -> int:
        told = self.status.running + self.status.waiting + len(self._unreported)
        return max(told, self.num_calls) + self._num_promised

    @contextlib.contextmanager
    def promised(self, num_uncached: int) -> Iterator[None]:
        """Counts a request that is about to be sent as this worker's load, so that the next ones are placed accordingly."""
        self._num_promised += 1
        self._num_promised_tokens += num_uncached
        try:
            yield
        finally:
            self._num_promised -= 1
            self._num_promised_tokens -= num_uncached

    def start_call(
        self, request: GenerateRequest, mailbox: Mailbox, number: int, num_uncached: int = 0, ask: Any = None
    ) -> WorkerCall:
        """Sends a request. `num_uncached` is the number of prompt tokens that the worker is expected to compute. Raises
        `LinkDown`, `RequestQuarantined`, and `FrameError` for a request that fits no frame.
        """
        if not self.is_up:
            raise LinkDown
        call = WorkerCall(self, request, mailbox, number)
        if not self._quarantine.is_empty:
            same = _same(request)
            if self._quarantine.is_guilty(same):
                raise RequestQuarantined
            call.is_suspect = self._quarantine.is_suspect(same)
        self.send(request)
        self._calls[call.key] = call
        self._unreported[call.key] = num_uncached
        return call

    async def probe(
        self, namespace: tuple[Region, ...], prompt: array[int], *, adapter: str, cache_read: bool
    ) -> CacheProbed:
        """Asks how much of the prompt the worker would find in its cache. Raises `LinkDown` if there is no answer,
        `FrameError` for a prompt that fits no frame.
        """
        hello = self.hello
        if hello is None:
            raise LinkDown
        self._num_probes += 1
        number = self._num_probes
        answer: asyncio.Future[CacheProbed] = asyncio.get_running_loop().create_future()
        self._probes[number] = answer
        try:
            self.send(CacheProbe(number, hello.root, namespace, prompt, cache_read, adapter))
            async with patience(PROBE_S):
                return await answer
        except TimeoutError:
            raise LinkDown from None
        finally:
            del self._probes[number]

    def drain(self, *, taken_back: bool = False) -> None:
        """Asks the worker to take nothing new, or to take requests again. Raises `LinkDown` if it is gone."""
        if self.hello is None:
            raise LinkDown
        self.send(DrainCommand(taken_back))

    def send(self, message: Message) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def forget(self, call: WorkerCall) -> None:
        self._calls.pop(call.key, None)

    def clear(self, call: WorkerCall) -> None:
        """Notes that the worker has survived the first steps of a suspect."""
        self._quarantine.passed(_same(call.request))

    @property
    def has_suspect(self) -> bool:
        """Whether a suspect is in its first steps here. One that makes no steps, as its client does not read, say, keeps
        others off for some seconds alone.
        """
        since = time.monotonic() - ALONE_S
        return any(call.is_suspect and call.is_in_first_steps and call.sent_at > since for call in self._calls.values())

    async def run(self) -> None:
        """Dials and serves until the link is lost; every open call then gets `Lost`. Records may still be under way to SQL,
        which may take seconds: `records.until_kept` waits for them. Raises `LinkDown` if the worker could not be reached at
        all, and `LinkRefused` if it speaks another version of the protocol, or if one side does not trust the other: such a
        worker ends the link before it has said anything.
        """
        context = self._trust.context(self.registration.address)
        try:
            async with patience(HELLO_S):
                self._connection = await dial(self.registration.address, context)
        except ssl.SSLError as error:
            raise LinkRefused(listener.why(error)) from None
        except (OSError, TimeoutError):
            raise LinkDown from None
        # Our hello is sent before anything is read: an answer to the worker's hello must not overtake it.
        self._connection.send(Hello(PROTOCOL_VERSION, self._process))
        self.records.begin()
        async with asyncio.TaskGroup() as tasks:
            beats = tasks.create_task(self._beat(self._connection))
            try:
                await self._listen(self._connection)
                is_cut = self._connection.is_aborted
            except BaseException:  # this gateway ends, or has a fault: the worker's process goes on
                self._connection.abort()
                raise
            finally:
                self._lose_calls()
                self._connection.abort()
                self.records.stop()
            beats.cancel()
        if self._refused:
            raise LinkRefused(self._refused)
        if not self._was_heard and not is_cut and addresses.host_port(self.registration.address) is not None:
            raise LinkRefused(ENDED_EARLY if context is not None else ENDED_EARLY_IN_PLAIN)

    def abort(self) -> None:
        """Ends the link, unless it is still being dialled."""
        if self._connection is not None:
            self._connection.abort()

    def _lose_calls(self) -> None:
        guilty = self._suspect_first() if self.hello is not None else frozenset()
        self.hello = None
        for call in list(self._calls.values()):
            call.deliver(Lost("the worker was lost", is_quarantined=call.key in guilty))
        for answer in self._probes.values():
            if not answer.done():
                answer.set_exception(LinkDown())

    def _suspect_first(self) -> frozenset[tuple[str, int]]:
        """Suspects the requests that are in their first steps. Returns the calls of those that are quarantined now."""
        assert self.hello is not None
        first = {key: _same(call.request) for key, call in self._calls.items() if call.is_in_first_steps}
        is_certain = self._connection is not None and not self._connection.is_aborted
        self._quarantine.link_ended(
            self.registration.worker, self.hello.process, set(first.values()), is_certain=is_certain
        )
        guilty = frozenset(key for key, same in first.items() if self._quarantine.is_guilty(same))
        for key in guilty:
            words = {"request_id": key[0], "tenant": self._calls[key].request.tenant}
            logger.error("request_quarantined", extra={**words, "worker": self.registration.worker})
        return guilty

    async def _beat(self, connection: Connection) -> None:
        while True:
            connection.send(Alive())
            if connection.num_queued_bytes > MAX_QUEUED_BYTES:
                connection.abort()
            await asyncio.sleep(HEARTBEAT_S)

    async def _listen(self, connection: Connection) -> None:
        try:
            await connection.listen(self._on_messages)
        except FrameError as error:
            connection.abort()
            logger.warning("worker_sent_garbage", extra={"worker": self.registration.worker, "why": str(error)})
        logger.info("worker_link_lost", extra={"worker": self.registration.worker})

    def _on_messages(self, messages: list[Message]) -> None:
        self._was_heard = True
        for message in messages:
            self._on_message(message)

    def _on_message(self, message: Message) -> None:
        match message:
            case StepFrame():
                self._on_step(message)
            case Finished() | Failed():
                self._unreported.pop((message.request_id, message.attempt), None)
                if isinstance(message, Failed) and message.code == "draining":
                    self.status = msgspec.structs.replace(
                        self.status, draining=True
                    )  # it says so before its next status
                self._to_call(message)
            case CacheProbed():
                self._on_probed(message)
            case WorkerStatus():
                self._on_status(message)
            case CacheEvent():
                if not self.cached.apply(message):
                    self._ask_snapshot()
            case EngineReport():
                self.report = message
            case AdapterReport():
                self.adapters = {one.name: one for one in message.adapters}
            case Hello():
                self._on_hello(message)
            case EngineRecords() | ResidencyReport():
                self.records.take(message)
            case _:
                pass  # messages of a newer protocol

    def _on_step(self, frame: StepFrame) -> None:
        """Sorts the tokens of one step. This is the road of every token, so it calls little."""
        calls, unreported = self._calls, self._unreported
        for delta in frame.deltas:
            key = (delta.request_id, delta.attempt)
            if unreported.get(key):
                unreported[key] = 0  # its prefill is done
            call = calls.get(key)
            if call is not None:
                call.deliver_delta(delta)

    def _on_status(self, status: WorkerStatus) -> None:
        self.status = status
        if self.hello is not None and not self._is_well and status.last_step_age_ms <= SUSPECT_STEP_AGE_MS:
            self._is_well = True
            self._quarantine.lives(self.hello.process)
        self._unreported.clear()
        if status.last_step_age_ms > STUCK_STEP_AGE_MS:
            logger.warning("worker_stuck", extra={"worker": self.registration.worker})
            self.abort()
        late = time.monotonic() - self._asked_at >= SNAPSHOT_S
        if status.cache_seq > self.cached.seq and late:
            self._ask_snapshot()  # the last events, or the snapshot itself, did not come

    def _ask_snapshot(self) -> None:
        if self._group_key:
            self._asked_at = time.monotonic()
            self.send(CacheCommand("snapshot", key=self._group_key))

    def _to_call(self, event: Finished | Failed) -> None:
        call = self._calls.get((event.request_id, event.attempt))
        if call is not None:
            call.deliver(event)

    def _on_probed(self, message: CacheProbed) -> None:
        answer = self._probes.get(message.peek_id)
        if answer is not None and not answer.done():
            answer.set_result(message)

    def _on_hello(self, hello: Hello) -> None:
        if hello.version != PROTOCOL_VERSION:
            self._refused = (
                f"it speaks version {hello.version} of the links' protocol, and this gateway {PROTOCOL_VERSION}"
            )
            self.abort()
            return
        if hello.model != self.registration.model:
            logger.warning("worker_not_usable", extra={"worker": self.registration.worker, "model": hello.model})
            return
        self.hello = hello
        self._quarantine.linked(self.registration.worker, hello.process)
        self._ask_snapshot()
        logger.info("worker_link_up", extra={"worker": self.registration.worker, "model": hello.model})


def _same(request: GenerateRequest) -> bytes:
    return fingerprint(request.tenant, request.model, request.adapter, request.prompt)


def new_process_id() -> str:
    return uuid.uuid4().hex
