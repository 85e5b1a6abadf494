"""The worker's I/O on one asyncio loop: links to gateways, the engine thread, the drain.

The module knows messages, and links by number. It knows no sequence and no block. It reaches the engine thread by one
queue, and the thread answers by `call_soon_threadsafe`; there is no lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from workers.engine.engine import Accept, Drain, Engine, Event, LinkClosed, StepOutput, Stop
from workers.engine.journal.shipping import Shipper
from workers.engine.link_listener import Listener, listen
from workers.engine.lora.adapter_reader import AdapterReader
from workers.engine.metrics import Metrics
from workers.engine.registration import keep_registered
from workers.engine.reports.engine_report import EngineReporter
from workers.engine.reports.residency import REPORT_EVERY_S, ResidencyMeter
from workers.engine.step import faults
from workers.process import turns
from workers.process.heartbeat import places
from workers.process.rounds import repeat
from workers.process.tls.certificates import FILES_EVERY_S, Certificate
from workers.protocol import registry
from workers.protocol.connection import HEARTBEAT_S, Connection
from workers.protocol.counts import EngineAck, EngineRecord, EngineRecords
from workers.protocol.frames import FrameError
from workers.protocol.messages import (
    PROTOCOL_VERSION,
    AdapterCommand,
    CacheEvent,
    DrainCommand,
    Hello,
    Message,
    StepFrame,
)
from workers.protocol.patience import SilentTime
from workers.protocol.reports import AdapterReport, AdapterState, WorkerStatus

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_QUEUED_BYTES = 32 * 1024 * 1024
"""Largest number of unread bytes of a gateway. A gateway that has more at a beat, and no less at the next, is not
reading, so its link is cut and its requests end. One step may bring more than this."""
HELLO_S = 3.0
LAST_RECORDS_S = 1.0
"""How long a worker that ends waits until its records are in SQL. A gateway gathers them for 0.2 s; without SQL they wait in
the journal for the next start."""
STUCK_S = 15.0
"""Seconds without a beat after which the engine thread is not alive."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The worker's identity for gateways and the registry."""

    worker: str
    model: str
    address: str
    redis_url: str = ""
    predecessor: str = ""
    """The process that had the slot's journal before this one."""
    certificate: Certificate | None = None
    """The certificate for links to a `tcp:` address, which then speak TLS."""


class Service:
    """The worker's service. `run` serves until `drain` has ended or the engine broke. Everything here runs on the
    loop's thread."""

    def __init__(
        self,
        identity: Identity,
        engine: Engine,
        hello: Hello,
        metrics: Metrics,
        unacked: list[EngineRecord],
        drain_s: float = 60.0,
    ) -> None:
        bytes_per_block = engine.runner.bytes_per_block
        self._residency = ResidencyMeter(hello.process, identity.model, bytes_per_block)
        self._reporter = EngineReporter(engine.runner.kernels, engine.runner.graphs)
        self.identity = identity
        self.engine_error: BaseException | None = None
        self.slot_is_taken = False
        """Another host's worker serves in this slot, so that this one drains."""
        self.status = WorkerStatus()
        self.ready = False
        self._engine = engine
        self._hello = hello
        self._metrics = metrics
        self._drain_s = drain_s
        self._inbox: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
        self._shipper = Shipper(unacked)
        self._adapters = AdapterReader(engine.runner, lambda read: self._inbox.put((0, read)))
        self._server: Listener | None = None
        self._links: dict[int, Connection] = {}
        self._unread: dict[int, int] = {}
        """Unread bytes of each link at the last beat."""
        self._num_links = 0
        self._num_attempts = 0
        self._beat_at = time.monotonic()
        """Time of the engine thread's last beat. That thread writes it itself, so that a loop that stood still does not
        take the engine for stuck."""
        self._silent = SilentTime(2 * HEARTBEAT_S)
        self._thread: threading.Thread | None = None
        self._was_stuck = False
        self._accepting_ended = False
        self._draining = asyncio.Event()
        self._stopped = asyncio.Event()
        self._quiet = asyncio.Event()

    @property
    def alive(self) -> bool:
        return self.engine_error is None and self._silent.look(self._beat_at) < STUCK_S

    def look_at_engine(self) -> bool:
        """Returns `alive`. The first time that it is not, the log says where the engine thread stands."""
        is_stuck, was_stuck = not self.alive, self._was_stuck
        self._was_stuck = is_stuck
        if is_stuck and not was_stuck and self._thread is not None and self.engine_error is None:
            frame = sys._current_frames().get(self._thread.ident or 0)
            logger.error("the engine stands still", extra={"event": "engine_stuck", "at": places(frame)})
        return not is_stuck

    @property
    def idle(self) -> bool:
        """Whether no request is here."""
        return self._num_attempts == 0

    @property
    def draining(self) -> bool:
        return self._accepting_ended

    def stop_accepting(self) -> None:
        """Refuses new requests, while running ones go on. It is safe to call twice."""
        if not self.draining:
            logger.info("draining", extra={"event": "drain_started"})
            self._accepting_ended = True
            self._inbox.put((0, Drain()))

    def accept_again(self) -> None:
        """Accepts requests again after `stop_accepting`, unless the process was told to end."""
        if self.draining and not self._draining.is_set():
            logger.info("accepting again", extra={"event": "drain_taken_back"})
            self._accepting_ended = False
            self._quiet.clear()
            self.status = msgspec.structs.replace(self.status, draining=False)
            self._inbox.put((0, Accept()))

    def drain(self) -> None:
        """Accepts nothing new and lets running requests finish; then `run` returns. It is safe to call twice and from a
        signal."""
        self.stop_accepting()
        self._draining.set()
        self._notice_quiet()

    async def run(self) -> None:
        """Serves. Raises `OSError` if the address cannot be listened on. If the engine broke, `engine_error` is set."""
        loop = asyncio.get_running_loop()
        self._thread = thread = threading.Thread(target=self._run_engine, args=(loop,), name="engine", daemon=True)
        thread.start()
        turns.shorten()  # after the engine thread's start: it computes, and what it starts has long turns, too
        try:
            async with self._listening(), asyncio.TaskGroup() as tasks:
                helpers = [
                    tasks.create_task(repeat(HEARTBEAT_S, self._send_heartbeats)),
                    tasks.create_task(repeat(REPORT_EVERY_S, self._tell_residency, waits_first=True)),
                ]
                if self.identity.certificate is not None:
                    look = self.identity.certificate.look
                    reading = repeat(FILES_EVERY_S, lambda: asyncio.to_thread(look), waits_first=True)
                    helpers.append(tasks.create_task(reading))
                if self.identity.redis_url:
                    helpers.append(tasks.create_task(self._keep_registered()))
                self.ready = True
                logger.info("worker serves", extra={"event": "worker_ready", "address": self.identity.address})
                await self._until_drained()
                for helper in helpers:
                    helper.cancel()
                self._adapters.close()
        finally:
            self._inbox.put((0, Stop()))
            await asyncio.to_thread(thread.join, STUCK_S)
        logger.info("worker ends", extra={"event": "worker_stopped"})

    async def _keep_registered(self) -> None:
        await keep_registered(self._registration(), self.identity.redis_url, self.identity.predecessor)
        self.slot_is_taken = True
        self.drain()

    # --- the engine thread ---

    def _run_engine(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._engine.run(self._inbox, lambda out: self._beat(loop, out))
        except BaseException as error:  # the thread's outermost frame: whatever it was, the process must learn of it
            logger.exception("the engine thread ended", extra={"event": "engine_broken"})
            _call(loop, self._engine_ended, error)

    def _beat(self, loop: asyncio.AbstractEventLoop, out: StepOutput) -> None:
        self._beat_at = time.monotonic()
        _call(loop, self._deliver, out)

    def _engine_ended(self, error: BaseException) -> None:
        self.engine_error = error
        self._stopped.set()

    def _deliver(self, out: StepOutput) -> None:
        """Delivers everything of one step, in order."""
        self.status = out.status
        self._num_attempts = out.num_attempts
        for link, message in out.messages:
            self._send(link, message)
        for record in out.records:
            self._shipper.add(record)
        if out.records:
            self._ship()
        if out.adapters is not None:
            self._tell_adapters(out.adapters)
        self._metrics.observe(out)
        self._reporter.observe(out.steps, out.cache, out.queues)
        if out.cache is not None:
            self._residency.observe(out.cache.tenants, time.time())
        self._notice_quiet()

    def _tell_adapters(self, states: tuple[AdapterState, ...]) -> None:
        self._adapters.report = AdapterReport(states)
        for link in list(self._links):
            self._send(link, self._adapters.report)

    def _notice_quiet(self) -> None:
        """Notes that nothing is left to do. Only the engine's status counts: if it is draining, it has handled
        everything that came before `Drain`."""
        if self.draining and self.status.draining and self._num_attempts == 0:
            self._quiet.set()

    def _send(self, link: int, message: Message) -> None:
        connection = self._links.get(link)
        if connection is None:
            return
        if isinstance(message, CacheEvent) and connection.num_queued_bytes > MAX_QUEUED_BYTES // 2:
            return  # the gap tells the gateway to ask for a snapshot once it reads again
        try:
            connection.send(message)
        except FrameError:
            if isinstance(message, StepFrame) and len(message.deltas) > 1:
                half = len(message.deltas) // 2  # logprobs of many prompts that ended in one step
                for deltas in (message.deltas[:half], message.deltas[half:]):
                    self._send(link, StepFrame(message.step, deltas))
                return
            logger.exception("a frame is too large", extra={"event": "frame_too_large"})
            connection.abort()

    def _cut_unread(self) -> None:
        """Cuts the links of the gateways that do not read."""
        unread = {link: connection.num_queued_bytes for link, connection in self._links.items()}
        for link, num_bytes in unread.items():
            if MAX_QUEUED_BYTES < self._unread.get(link, 0) <= num_bytes:
                logger.warning("a gateway does not read", extra={"event": "slow_gateway", "link": link})
                self._links[link].abort()
        self._unread = unread

    def _ship(self) -> None:
        while (batch := self._shipper.next(list(self._links), time.monotonic())) is not None:
            link, records = batch
            self._send(link, EngineRecords(self.identity.worker, tuple(records)))

    # --- links ---

    @contextlib.asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        server = await listen(self.identity.address, self.identity.certificate, self._serve_link)
        self._server = server
        try:
            yield
        finally:
            server.close()
            for connection in self._links.values():
                connection.close()
            await server.wait_closed()

    async def _serve_link(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_links += 1
        link, connection = self._num_links, Connection(reader, writer)
        connection.send(self._hello)
        try:
            async for messages in connection:
                for message in messages:
                    self._receive(link, connection, message)
        except FrameError as error:
            logger.warning("link closed: %s", error, extra={"event": "bad_frame", "link": link})
        finally:
            self._lose(link)
            connection.abort() if connection.num_queued_bytes else connection.close()

    def _receive(self, link: int, connection: Connection, message: Message) -> None:
        if link not in self._links:
            if not isinstance(message, Hello):
                raise FrameError("the first frame was no hello")
            if self._server is None or not self._server.is_serving():
                connection.abort()  # it came as the links were closed, and the end of this process waits for it
                return
            self._links[link] = connection
            connection.send(self._status_now())
            connection.send(self._adapters.report)
            connection.send(self._reporter.report(time.monotonic()))
            self._ship()
        elif isinstance(message, AdapterCommand) and message.action == "load":
            self._load_adapter(link, message)
        elif isinstance(message, DrainCommand):
            if message.taken_back:
                self.accept_again()
            else:
                self.stop_accepting()
            self._tell_status()  # before the next beat: a gateway that drains another worker now needs this one
        elif isinstance(message, EngineAck):
            if acked := self._shipper.ack(link, message.seq, time.monotonic()):
                self._inbox.put((link, EngineAck(message.worker, acked)))
                self._ship()
        else:
            self._inbox.put((link, message))

    def _load_adapter(self, link: int, command: AdapterCommand) -> None:
        """Reads an adapter. The command is checked here, because the engine gets it only after the adapter was read."""
        if fault := faults.of_other(command, self._engine.runner.vocab_size):
            logger.warning("a message has %s: left aside", fault, extra={"event": "bad_message", "link": link})
            return
        self._adapters.read(command)

    def _lose(self, link: int) -> None:
        """Removes a link. Sequences end with the link on which they came."""
        if self._links.pop(link, None) is not None:
            self._inbox.put((link, LinkClosed()))
            self._ship()

    def _status_now(self) -> WorkerStatus:
        """Returns the engine's last status and its age. The age is computed here, because an engine that hangs cannot
        send its own."""
        age_ms = int(self._silent.look(self._beat_at) * 1000)
        return msgspec.structs.replace(self.status, last_step_age_ms=age_ms, draining=self.draining)

    def _tell_status(self) -> None:
        status = self._status_now()
        for link in list(self._links):
            self._send(link, status)

    def _send_heartbeats(self) -> None:
        self._cut_unread()
        self._tell_status()
        report = self._reporter.report(time.monotonic())
        for link in list(self._links):
            self._send(link, report)
        self._ship()

    def _tell_residency(self) -> None:
        """Sends the reports to one gateway, a random one each time, because all gateways write the same sums."""
        if not self._links:
            return
        link = random.choice(list(self._links))
        for report in self._residency.reports():
            self._send(link, report)

    # --- drain ---

    async def _until_drained(self) -> None:
        draining = asyncio.ensure_future(self._draining.wait())
        stopped = asyncio.ensure_future(self._stopped.wait())
        waiters = {draining, stopped}
        try:
            await asyncio.wait(waiters, return_when=asyncio.FIRST_COMPLETED)
            quiet = asyncio.ensure_future(self._quiet.wait())  # not before: a drain may have been taken back
            waiters.add(quiet)
            await asyncio.wait({quiet, stopped}, timeout=self._drain_s, return_when=asyncio.FIRST_COMPLETED)
            if not self._quiet.is_set() and self.engine_error is None:
                self._inbox.put((0, Drain(now=True)))
                await asyncio.wait({quiet, stopped}, return_when=asyncio.FIRST_COMPLETED)
            self._tell_residency()
            await self._flush()
        finally:
            for waiter in waiters:
                waiter.cancel()

    async def _flush(self) -> None:
        """Waits until the endings have reached their gateways, and the records SQL, before the links close."""
        now = time.monotonic()
        sent_until, kept_until = now + HELLO_S, now + min(LAST_RECORDS_S, self._drain_s)
        while (any(c.num_queued_bytes for c in self._links.values()) and now < sent_until) or (
            self._links and len(self._shipper) and now < kept_until
        ):
            await asyncio.sleep(0.01)
            now = time.monotonic()

    def _registration(self) -> registry.Registration:
        return registry.Registration(
            worker=self.identity.worker,
            process=self._hello.process,
            address=self.identity.address,
            model=self.identity.model,
            root=self._hello.root,
            pid=os.getpid(),
        )


def hello_of(engine: Engine, model: str, process: str) -> Hello:
    runner, abilities = engine.runner, engine.runner.abilities
    return Hello(
        PROTOCOL_VERSION,
        process,
        model,
        runner.root,
        runner.block_size,
        runner.num_blocks,
        engine.scheduler.limits.max_len,
        engine.scheduler.limits.max_running,
        tasks=abilities.tasks,
        vector_size=abilities.vector_size,
        dimensions=abilities.dimensions,
        any_dimensions=abilities.any_dimensions,
        pairs=abilities.pairs,
        vocabulary=runner.vocabulary,
        takes_over=True,
    )


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[T], None], value: T) -> None:
    try:
        loop.call_soon_threadsafe(callback, value)
    except RuntimeError:
        pass  # the loop is closed: nobody is left to receive the value
