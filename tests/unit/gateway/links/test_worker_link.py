"""A link to a worker, with the worker's side played by hand over a real socket."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
from gateways import until
from load import stretched

from gateway.routing.links import worker_records
from gateway.routing.links.link import Lost, Mailbox
from gateway.routing.links.quarantine import fingerprint
from gateway.routing.links.worker_link import WorkerCall, WorkerLink
from workers.engine.journal.shipping import Shipper
from workers.protocol.connection import Connection
from workers.protocol.counts import EngineAck, EngineRecord, EngineRecords, ResidencyReport, TokenUsage
from workers.protocol.messages import (
    Cancel,
    DrainCommand,
    ExtendLease,
    Failed,
    Finished,
    GenerateRequest,
    Hello,
    Message,
    SamplingParams,
    StepFrame,
    TokenDelta,
)
from workers.protocol.registry import Registration
from workers.protocol.reports import EngineReport, WorkerStatus


class HandWorker:
    """Keeps what it hears; says what the test tells it."""

    def __init__(self) -> None:
        self.heard: list[Message] = []
        self.connection: Connection | None = None
        self.connected = asyncio.Event()

    async def on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection = Connection(reader, writer)
        self.say(Hello(1, "process", model="m", root="r", max_model_len=64))
        self.connected.set()
        async for messages in self.connection:
            self.heard += messages

    def say(self, *messages: Message) -> None:
        assert self.connection is not None
        for message in messages:
            self.connection.send(message)

    async def hears(self, kind: type, count: int = 1) -> list[Message]:
        def found() -> list[Message]:
            return [message for message in self.heard if isinstance(message, kind)]

        await until(lambda: len(found()) >= count)
        return found()


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[HandWorker, WorkerLink]]:
    worker = HandWorker()
    server = await asyncio.start_unix_server(worker.on_connect, tmp_path / "w.sock")

    async def keep(records: EngineRecords) -> EngineAck:
        return EngineAck(records.worker, records.records[-1].seq)

    link = WorkerLink(Registration("worker-0", "p", f"unix:{tmp_path / 'w.sock'}", "m", "r", 1), "me", keep)
    running = asyncio.create_task(link.run())
    await worker.connected.wait()
    await until(lambda: link.is_up)
    yield worker, link
    if worker.connection is not None:
        worker.connection.abort()
    await running
    server.close()


def start(link: WorkerLink, mailbox: Mailbox, attempt: int = 0) -> WorkerCall:
    request = GenerateRequest(
        "req_1",
        "t",
        "m",
        "r",
        (),
        array("i", (1, 2)),
        SamplingParams(1),
        8,
        lease_bound=8,
        attempt=attempt,
        num_choices=2,
    )
    return link.start_call(request, mailbox, 7)


def delta(seq_no: int, index: int = 0, attempt: int = 0, request_id: str = "req_1") -> StepFrame:
    return StepFrame(1, (TokenDelta(request_id, attempt, index, seq_no, (9,)),))


async def test_events_reach_the_call_they_belong_to_in_order(pair: tuple[HandWorker, WorkerLink]) -> None:
    worker, link = pair
    mailbox = Mailbox()
    start(link, mailbox)
    worker.say(delta(0), delta(0, index=1), delta(1), delta(0, request_id="req_other"))
    worker.say(Finished("req_1", 0, TokenUsage(output=3), "length"))
    events = []
    while not events or not isinstance(events[-1][1], Finished):
        events += await mailbox.take()
    assert [number for number, _ in events] == [7] * 4
    assert link.num_calls == 0


@pytest.mark.parametrize(
    ("end", "is_suspect"),
    [
        (Failed("req_1", 0, TokenUsage(), "overloaded"), True),
        (Finished("req_1", 0, TokenUsage(), "cancelled"), True),
        (Finished("req_1", 0, TokenUsage(output=3), "length"), False),
    ],
    ids=["refused", "cancelled", "whole"],
)
async def test_a_suspect_is_cleared_by_a_run_and_not_by_a_refusal(
    pair: tuple[HandWorker, WorkerLink], end: Failed | Finished, is_suspect: bool
) -> None:
    """A worker that is too busy for it would clear it otherwise, and so would a client that leaves at once."""
    worker, link = pair
    same = fingerprint("t", "m", "", array("i", (1, 2)))
    link._quarantine.link_ended("worker-1", "another process", [same], is_certain=True)
    mailbox = Mailbox()
    start(link, mailbox)
    assert link.has_suspect
    worker.say(end)
    await mailbox.take()
    assert link._quarantine.is_suspect(same) == is_suspect
    assert not link.has_suspect


async def test_a_suspect_that_makes_no_steps_keeps_others_off_for_some_seconds_alone(
    pair: tuple[HandWorker, WorkerLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, link = pair
    same = fingerprint("t", "m", "", array("i", (1, 2)))
    link._quarantine.link_ended("worker-1", "another process", [same], is_certain=True)
    start(link, Mailbox())
    assert link.has_suspect
    monkeypatch.setattr("gateway.routing.links.worker_link.ALONE_S", 0.0)
    assert not link.has_suspect
    assert link._quarantine.is_suspect(same)


async def test_a_request_that_is_about_to_be_sent_counts_as_load(pair: tuple[HandWorker, WorkerLink]) -> None:
    """Requests that come at the same moment see each other before one of them is sent."""
    _, link = pair
    with link.promised(100), link.promised(20):
        assert (link.load, link.num_unreported_tokens) == (2, 120)
    with pytest.raises(ValueError, match="not opened"), link.promised(7):
        raise ValueError("not opened")
    assert (link.load, link.num_unreported_tokens) == (0, 0)


async def test_stale_and_repeated_deltas_are_dropped(pair: tuple[HandWorker, WorkerLink]) -> None:
    worker, link = pair
    mailbox = Mailbox()
    start(link, mailbox, attempt=1)
    worker.say(delta(0, attempt=0), delta(0, attempt=1), delta(0, attempt=1), delta(1, attempt=1))
    worker.say(Finished("req_1", 1, TokenUsage(), "stop"))
    events = []
    while not events or not isinstance(events[-1][1], Finished):
        events += await mailbox.take()
    assert [event.seq_no for _, event in events if isinstance(event, TokenDelta)] == [0, 1]


@pytest.mark.parametrize("frame", [delta(3), delta(0, index=5)])
async def test_a_gap_or_a_foreign_choice_ends_the_attempt(
    pair: tuple[HandWorker, WorkerLink], frame: StepFrame
) -> None:
    worker, link = pair
    mailbox = Mailbox()
    start(link, mailbox)
    worker.say(frame)
    [(_, event)] = await mailbox.take()
    assert isinstance(event, Lost)
    assert await worker.hears(Cancel)
    worker.say(delta(0))  # what still comes is nobody's
    await asyncio.sleep(0.05)
    assert link.num_calls == 0


async def test_a_link_that_breaks_loses_its_calls_and_takes_no_more(pair: tuple[HandWorker, WorkerLink]) -> None:
    worker, link = pair
    mailbox = Mailbox()
    start(link, mailbox)
    assert worker.connection is not None
    worker.connection.abort()
    [(_, event)] = await mailbox.take()
    assert isinstance(event, Lost)
    assert not link.is_up
    assert not link.takes_work


async def test_a_link_is_lost_at_once_though_records_are_being_written(tmp_path: Path) -> None:
    """SQL may take long. The clients of a lost worker do not wait for it, and neither does the next link."""
    worker, written = HandWorker(), asyncio.Event()

    async def keep(_: EngineRecords) -> None:
        await written.wait()

    async with await asyncio.start_unix_server(worker.on_connect, tmp_path / "w.sock"):
        link = WorkerLink(Registration("worker-0", "p", f"unix:{tmp_path / 'w.sock'}", "m", "r", 1), "me", keep)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_up)
        mailbox = Mailbox()
        start(link, mailbox)
        worker.say(EngineRecords("worker-0", (EngineRecord(1, "req_0", 0, "t", "r", TokenUsage(output=1)),)))
        await until(lambda: not link.records.num_waiting)
        await asyncio.sleep(0.05)
        assert worker.connection is not None
        worker.connection.abort()
        [(_, event)] = await mailbox.take()
        assert isinstance(event, Lost)
        async with asyncio.timeout(stretched(2)):
            await running
        keeping = asyncio.create_task(link.records.until_kept())
        await asyncio.sleep(0.05)
        assert not keeping.done()
        written.set()
        await keeping


async def test_records_that_cannot_be_kept_for_a_fault_of_ours_keep_none_back(tmp_path: Path) -> None:
    """The fault ended every link of the gateway, for good."""
    worker, kept = HandWorker(), []

    async def keep(records: EngineRecords) -> None:
        kept.append(records.records[0].seq)
        raise RuntimeError("a fault")

    async with await asyncio.start_unix_server(worker.on_connect, tmp_path / "w.sock"):
        link = WorkerLink(Registration("worker-0", "p", f"unix:{tmp_path / 'w.sock'}", "m", "r", 1), "me", keep)
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_up)
        for seq in (1, 2):
            worker.say(EngineRecords("worker-0", (EngineRecord(seq, "req_0", 0, "t", "r", TokenUsage(output=1)),)))
        await until(lambda: kept == [1, 2])
        assert link.is_up
        assert worker.connection is not None
        worker.connection.abort()
        await running


async def test_a_repeated_bound_has_a_number_of_its_own(pair: tuple[HandWorker, WorkerLink]) -> None:
    worker, link = pair
    call = start(link, Mailbox())
    call.extend(8, wait_ms=1000)
    call.extend(8, wait_ms=1000)
    call.extend(16)
    extensions = await worker.hears(ExtendLease, 3)
    assert [(e.lease_seq, e.bound, e.wait_ms) for e in extensions if isinstance(e, ExtendLease)] == [
        (1, 8, 1000),
        (2, 8, 1000),
        (3, 16, 0),
    ]


async def test_status_decides_who_takes_work(pair: tuple[HandWorker, WorkerLink]) -> None:
    worker, link = pair

    async def after(status: WorkerStatus) -> bool:
        worker.say(status)
        await until(lambda: link.status == status)
        return link.takes_work

    assert await after(WorkerStatus(running=3, waiting=2, last_step_age_ms=20))
    assert link.load == 5
    assert not await after(WorkerStatus(draining=True))
    assert not await after(WorkerStatus(running=1, last_step_age_ms=4000))
    assert await after(WorkerStatus(running=0, last_step_age_ms=500))


async def test_an_engine_stuck_in_a_step_is_given_up(pair: tuple[HandWorker, WorkerLink]) -> None:
    worker, link = pair
    mailbox = Mailbox()
    start(link, mailbox)
    worker.say(WorkerStatus(running=1, last_step_age_ms=16_000))
    [(_, event)] = await mailbox.take()
    assert isinstance(event, Lost)


async def test_records_are_acknowledged_after_they_are_kept(pair: tuple[HandWorker, WorkerLink]) -> None:
    worker, _ = pair
    record = EngineRecord(41, "req_1", 0, "t", "r", TokenUsage(output=1))
    worker.say(EngineRecords("worker-0", (record,)))
    assert await worker.hears(EngineAck) == [EngineAck("worker-0", 41)]


class RecordingWorker(HandWorker):
    """Sends engine records as a worker does: the next ones once the last ones are answered."""

    def __init__(self) -> None:
        super().__init__()
        self.shipper = Shipper()
        self.num_records = 0

    async def on_connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connection = Connection(reader, writer)
        self.say(Hello(1, "process", model="m", root="r", max_model_len=64))
        async for messages in self.connection:
            for message in messages:
                if isinstance(message, EngineAck):
                    self.shipper.ack(0, message.seq, 0.0)
                    self.ship()

    def end_request(self) -> None:
        self.num_records += 1
        name = f"req_{self.num_records}"
        self.shipper.add(EngineRecord(self.num_records, name, 0, "t", "r", TokenUsage(output=1)))
        self.ship()

    def ship(self) -> None:
        if (batch := self.shipper.next([0], 0.0)) is not None:
            self.say(EngineRecords("worker-0", tuple(batch[1])))


@dataclass
class Keeper:
    """Keeps records, and notes when and how many at once."""

    frames: list[tuple[float, int]] = field(default_factory=list)

    async def keep(self, frame: EngineRecords | ResidencyReport) -> EngineAck:
        assert isinstance(frame, EngineRecords)
        self.frames.append((asyncio.get_running_loop().time(), len(frame.records)))
        return EngineAck(frame.worker, frame.records[-1].seq)


@pytest.fixture
async def recording(tmp_path: Path) -> AsyncIterator[tuple[RecordingWorker, WorkerLink, Keeper]]:
    worker, keeper = RecordingWorker(), Keeper()
    server = await asyncio.start_unix_server(worker.on_connect, tmp_path / "w.sock")
    link = WorkerLink(Registration("worker-0", "p", f"unix:{tmp_path / 'w.sock'}", "m", "r", 1), "me", keeper.keep)
    running = asyncio.create_task(link.run())
    await until(lambda: link.is_up)
    yield worker, link, keeper
    assert worker.connection is not None
    worker.connection.abort()
    await running
    server.close()


async def test_records_that_come_in_quick_succession_are_kept_together(
    recording: tuple[RecordingWorker, WorkerLink, Keeper],
) -> None:
    """A transaction for each of them costs more than its row."""
    worker, _, keeper = recording
    for _ in range(100):
        worker.end_request()
        await asyncio.sleep(0.002)
    await until(lambda: not len(worker.shipper))
    times, counts = zip(*keeper.frames, strict=True)
    assert sum(counts) == 100
    assert counts[0] == 1
    assert all(later - earlier >= 0.19 for earlier, later in pairwise(times))


async def test_a_gateway_that_ends_keeps_all_records_at_once(
    recording: tuple[RecordingWorker, WorkerLink, Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_records, "RECORDS_EVERY_S", 60.0)
    worker, link, keeper = recording
    worker.end_request()
    await until(lambda: not len(worker.shipper))
    worker.end_request()
    await until(lambda: link.records.num_waiting > 0)
    worker.end_request()
    assert len(worker.shipper) == 2, "one of them waits in the link, and one in the worker"
    await link.records.finish()
    assert [count for _, count in keeper.frames] == [1, 1, 1]
    assert not len(worker.shipper)


async def test_a_mailbox_tells_a_failure_before_what_is_in_it() -> None:
    mailbox = Mailbox()
    mailbox.put(0, Lost("x"))
    mailbox.fail(RuntimeError("cut"))
    with pytest.raises(RuntimeError, match="cut"):
        await mailbox.take()
    mailbox.forgive()
    assert await mailbox.take() == [(0, Lost("x"))]


async def test_a_linked_worker_reports_and_is_asked_to_drain(pair: tuple[HandWorker, WorkerLink]) -> None:
    worker, link = pair
    worker.say(EngineReport(wait_ms=7))
    await until(lambda: link.report.wait_ms == 7)
    link.drain()
    assert await worker.hears(DrainCommand) == [DrainCommand()]
