import asyncio
import signal
import struct
import sys
import time
from pathlib import Path

import msgspec
import pytest
from fakes import MODEL, ROOT, Fault, ScriptedWorker, encode, expected_output, generate_request
from gateway_link import GatewayLink, until
from load import stretched

from cache.blocks.usage import SHARED
from workers.engine.journal.journal import EngineJournal
from workers.engine.service import Service
from workers.protocol import connection
from workers.protocol.counts import EngineAck, EngineRecords
from workers.protocol.engine_journal import CRASH_REASON
from workers.protocol.frames import MAX_FRAME_BYTES
from workers.protocol.messages import (
    BeamParams,
    Cancel,
    DrainCommand,
    Failed,
    Finished,
    Hello,
    SamplingParams,
    StepFrame,
)
from workers.protocol.reports import EngineReport, WorkerStatus


@pytest.fixture
async def worker(tmp_path):
    async with ScriptedWorker(tmp_path / "w.sock", tokens_per_s=500) as worker:
        yield worker


def alone(request):
    return expected_output(request.prompt, request.sampling, request.max_tokens)


async def quiet(worker, limit_s=5):
    """Until nothing runs in the worker; its blocks must all be back."""
    await until(lambda: not worker.engine.attempts, limit_s)
    assert worker.engine.cache.available(SHARED) == worker.runner.num_blocks - 1


async def test_a_request_is_served_from_hello_to_finished(worker):
    async with await GatewayLink.dial(worker.address) as gateway:
        hello = await gateway.of(Hello)
        assert (hello.model, hello.root, hello.block_size) == (MODEL, ROOT, 16)
        await gateway.of(WorkerStatus)
        request = generate_request("req_1", max_tokens=20)
        gateway.send(request)
        finished = await gateway.of(Finished)
        assert gateway.tokens("req_1") == alone(request)
        assert finished.usage.prompt == len(request.prompt)
        assert (finished.usage.output, finished.reason) == (20, "length")
        assert isinstance(gateway.heard[-1], Finished | WorkerStatus | EngineReport)


async def test_a_listener_on_tcp_serves_as_well(tmp_path):
    worker = ScriptedWorker(tmp_path / "unused")
    worker.service.identity = type(worker.service.identity)("worker-0", MODEL, "tcp:127.0.0.1:0")
    async with worker:
        port = worker.service._server.sockets[0].getsockname()[1]
        async with await GatewayLink.dial(f"tcp:127.0.0.1:{port}") as gateway:
            gateway.send(generate_request("r", max_tokens=3))
            await gateway.of(Finished)


async def test_deltas_of_two_gateways_go_only_to_the_link_they_belong_to(worker):
    async with await GatewayLink.dial(worker.address) as one, await GatewayLink.dial(worker.address) as two:
        requests = [generate_request(f"r{i}", encode(f"prompt {i}"), 15) for i in range(6)]
        for number, request in enumerate(requests):
            (one if number % 2 else two).send(request)
        same = (generate_request("same", encode("one"), 9), generate_request("same", encode("two"), 9))
        one.send(same[0])
        two.send(same[1])
        for number, request in enumerate(requests):
            link = one if number % 2 else two
            await link.of(Finished, request_id=request.request_id)
            assert link.tokens(request.request_id) == alone(request)
        for link, request in zip((one, two), same, strict=True):
            await link.of(Finished, request_id="same")
            assert link.tokens("same") == alone(request)
        assert one.requests_heard_of() == {"r1", "r3", "r5", "same"}
        assert two.requests_heard_of() == {"r0", "r2", "r4", "same"}


async def test_a_cancelled_request_stops_and_gives_its_blocks_back(worker):
    async with await GatewayLink.dial(worker.address) as gateway:
        gateway.send(generate_request("r", max_tokens=1000))
        await gateway.of(StepFrame)
        gateway.send(Cancel("r"))
        finished = await gateway.of(Finished)
        assert finished.reason == "cancelled"
        assert finished.usage.output == len(gateway.tokens("r"))
        await quiet(worker)


async def test_a_gateway_that_hangs_up_takes_only_its_own_requests_along(worker):
    async with await GatewayLink.dial(worker.address) as stays:
        leaves = await GatewayLink.dial(worker.address)
        kept = generate_request("kept", max_tokens=200)
        stays.send(kept)
        leaves.send(generate_request("lost", max_tokens=1900))
        await leaves.of(StepFrame)
        await leaves.close()
        await until(lambda: len(worker.engine.attempts) < 2)
        await stays.of(Finished)
        assert stays.tokens("kept") == alone(kept)
        await quiet(worker)


async def test_a_gateway_that_is_silent_for_a_time_is_lost_with_its_requests(quick_beats, tmp_path, monkeypatch):
    assert connection.SILENCE_S == 3.0
    monkeypatch.setattr(connection, "SILENCE_S", 0.9)
    async with (
        ScriptedWorker(tmp_path / "w.sock", tokens_per_s=500) as worker,
        await GatewayLink.dial(worker.address, alive=False) as gateway,
    ):
        started = time.monotonic()
        gateway.send(generate_request("r", max_tokens=100_000, lease_bound=1900))
        await gateway.of(StepFrame)
        await asyncio.wait_for(gateway.closed.wait(), stretched(5))
        assert 0.6 < time.monotonic() - started < stretched(2)
        await quiet(worker, limit_s=stretched(1))


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 100, struct.pack(">I", MAX_FRAME_BYTES + 1), struct.pack(">I", 3) + b"\x00\x01\x02"],
    ids=["noise", "too-long", "no-message"],
)
async def test_garbage_closes_its_own_link_only(worker, garbage):
    async with await GatewayLink.dial(worker.address) as good:
        request = generate_request("r", max_tokens=100)
        good.send(request)
        bad = await GatewayLink.dial(worker.address)
        bad.send(generate_request("bad", max_tokens=1000))
        await bad.of(StepFrame)
        bad.send_raw(garbage)
        await asyncio.wait_for(bad.closed.wait(), stretched(3))
        await bad.close()
        await good.of(Finished)
        assert good.tokens("r") == alone(request)
        await quiet(worker)


async def test_a_first_frame_that_is_no_hello_closes_the_link(worker):
    gateway = await GatewayLink.dial(worker.address, hello=False, alive=False)
    gateway.send(generate_request("r"))
    await asyncio.wait_for(gateway.closed.wait(), stretched(3))
    assert [type(message) for message in gateway.heard] == [Hello]
    await gateway.close()


async def test_a_gateway_that_stops_reading_is_cut_and_others_go_on(quick_beats, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("workers.engine.service.MAX_QUEUED_BYTES", 20_000)
    async with ScriptedWorker(tmp_path / "w.sock", tokens_per_s=2000) as worker:
        deaf = await GatewayLink.dial(worker.address)
        deaf.connection._reader._transport.pause_reading()
        prompt = encode("x" * 200)
        deaf.send(*[generate_request(f"d{i}", prompt, 9, prompt_logprobs=20) for i in range(40)])
        async with await GatewayLink.dial(worker.address) as good:
            await until(lambda: "does not read" in caplog.text, stretched(5))  # by two beats
            request = generate_request("r", max_tokens=50)
            good.send(request)
            await good.of(Finished)
            assert good.tokens("r") == alone(request)
        await deaf.close()
        await quiet(worker)


async def test_status_comes_each_second_and_says_when_the_worker_drains(worker):
    async with await GatewayLink.dial(worker.address) as gateway:
        await asyncio.sleep(1.2)
        worker.service.stop_accepting()
        await gateway.of(WorkerStatus, draining=True)
        statuses = [m for m in gateway.heard if isinstance(m, WorkerStatus)]
        assert 2 <= len(statuses) <= 5
        assert statuses[-1].free_blocks == worker.runner.num_blocks - 1


# --- drain ---


async def test_a_drain_is_taken_back_until_the_process_is_told_to_end(tmp_path):
    async with (
        ScriptedWorker(tmp_path / "w.sock", tokens_per_s=200) as worker,
        await GatewayLink.dial(worker.address) as gateway,
    ):
        gateway.send(DrainCommand())
        await gateway.of(WorkerStatus, draining=True)
        await until(worker.service._quiet.is_set)
        gateway.send(DrainCommand(taken_back=True))
        await until(lambda: not [m for m in gateway.heard if isinstance(m, WorkerStatus)][-1].draining)
        request = generate_request("new", max_tokens=60)
        gateway.send(request)
        await gateway.of(StepFrame)
        worker.service.drain()  # a quiet moment of the first drain must not end this one
        gateway.send(DrainCommand(taken_back=True))
        assert (await gateway.of(Finished)).reason == "length"
        await asyncio.wait_for(asyncio.shield(worker._task), stretched(5))


async def test_a_draining_worker_refuses_new_work_finishes_the_old_and_ends(tmp_path):
    async with (
        ScriptedWorker(tmp_path / "w.sock", tokens_per_s=200) as worker,
        await GatewayLink.dial(worker.address) as gateway,
    ):
        old = generate_request("old", max_tokens=60)
        gateway.send(old)
        await gateway.of(StepFrame)
        worker.service.drain()
        gateway.send(generate_request("new"))
        refused = await gateway.of(Failed)
        assert (refused.request_id, refused.code) == ("new", "draining")
        await gateway.of(Finished, request_id="old")
        assert gateway.tokens("old") == alone(old)
        await asyncio.wait_for(gateway.closed.wait(), stretched(3))
        await asyncio.wait_for(worker._task, stretched(3))


async def test_the_drain_limit_hands_running_requests_back_with_their_usage(tmp_path):
    async with (
        ScriptedWorker(tmp_path / "w.sock", tokens_per_s=100, drain_s=0.2) as worker,
        await GatewayLink.dial(worker.address) as gateway,
    ):
        gateway.send(generate_request("r", max_tokens=1500))
        await gateway.of(StepFrame)
        worker.service.drain()
        failed = await gateway.of(Failed)
        assert failed.code == "draining"
        assert failed.usage.output == len(gateway.tokens("r"))
        await asyncio.wait_for(worker._task, stretched(3))


async def test_a_gateway_that_is_heard_first_as_the_links_close_is_hung_up(tmp_path):
    async with ScriptedWorker(tmp_path / "w.sock") as worker:
        late = await GatewayLink.dial(worker.address, hello=False, alive=False)
        await late.of(Hello)
        worker.service.drain()
        await until(lambda: not worker.service._server.is_serving())
        late.send(Hello(1, "gateway"))
        await asyncio.wait_for(late.closed.wait(), stretched(2))  # sooner than by silence
        assert not worker.service._links
        await late.close()


# --- records ---


async def test_records_are_shipped_until_acknowledged_and_survive_a_restart(tmp_path):
    journal_dir = tmp_path / "journal"
    async with (
        ScriptedWorker(tmp_path / "w.sock", journal_dir=journal_dir) as worker,
        await GatewayLink.dial(worker.address) as gateway,
    ):
        gateway.send(generate_request("r1"))
        finished = await gateway.of(Finished)
        (record,) = (await gateway.of(EngineRecords)).records
        assert (record.request_id, record.usage) == ("r1", finished.usage)
    async with (
        ScriptedWorker(tmp_path / "w.sock", journal_dir=journal_dir) as worker,
        await GatewayLink.dial(worker.address) as gateway,
    ):
        again = await gateway.of(EngineRecords)
        assert again.records == (record,)
        gateway.send(EngineAck(again.worker, record.seq))
        await until(lambda: not worker.engine._journal.unacked)
    journal = EngineJournal(journal_dir, "worker-0", "p", ROOT)
    assert journal.unacked == []
    journal.close()


async def test_a_drained_worker_waits_for_the_answer_to_its_records(tmp_path):
    """A gateway gathers records for a moment. The next process with this journal may come much later, or never."""
    async with (
        ScriptedWorker(tmp_path / "w.sock", journal_dir=tmp_path / "journal") as worker,
        await GatewayLink.dial(worker.address) as gateway,
    ):
        gateway.send(generate_request("r1"))
        first = await gateway.of(EngineRecords)
        gateway.send(generate_request("r2"))
        await gateway.of(Finished, request_id="r2")
        worker.service.drain()
        await asyncio.sleep(0.3)
        gateway.send(EngineAck(first.worker, first.records[-1].seq))
        await until(lambda: sum(isinstance(one, EngineRecords) for one in gateway.heard) == 2)
        second = next(one for one in reversed(gateway.heard) if isinstance(one, EngineRecords))
        assert [record.request_id for record in second.records] == ["r2"]
        gateway.send(EngineAck(second.worker, second.records[-1].seq))
        await asyncio.wait_for(worker._task, stretched(3))
    journal = EngineJournal(tmp_path / "journal", "worker-0", "p", ROOT)
    assert journal.unacked == []
    journal.close()


TESTS = Path(__file__).parents[2]
VICTIM = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fakes import ScriptedWorker
async def main():
    async with ScriptedWorker(Path(sys.argv[2]), tokens_per_s=300, journal_dir=Path(sys.argv[3])):
        print("ready", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_kill_9_mid_stream_leaves_records_of_every_token_that_was_told(tmp_path):
    socket_path, journal_dir = tmp_path / "w.sock", tmp_path / "journal"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        VICTIM,
        str(TESTS),
        str(socket_path),
        str(journal_dir),
        stdout=asyncio.subprocess.PIPE,
        cwd=TESTS.parent,
    )
    try:
        assert await process.stdout.readline() == b"ready\n"
        gateway = await GatewayLink.dial(f"unix:{socket_path}")
        short = generate_request("short", max_tokens=4)
        streams = [generate_request(f"r{i}", encode(f"stream {i}"), 1500) for i in range(8)]
        gateway.send(short, *streams)
        await gateway.until(lambda _: len(gateway.tokens("r7")) > 30)
        process.send_signal(signal.SIGKILL)
        await asyncio.wait_for(gateway.closed.wait(), stretched(3))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
    journal = EngineJournal(journal_dir, "worker-0", "p", ROOT)
    records = {record.request_id: record for record in journal.unacked}
    journal.close()
    assert set(records) == {"short", *(request.request_id for request in streams)}
    assert records["short"].usage.output == 4
    for request in streams:
        record = records[request.request_id]
        told = gateway.tokens(request.request_id)
        assert told == alone(request)[: len(told)]
        # Journalled first: it may be a step or two ahead of what left the socket, never behind.
        assert 0 <= record.usage.output - len(told) <= 3
        assert record.usage.prompt == len(request.prompt)
        assert record.reason == CRASH_REASON
    await gateway.close()


# --- a broken engine ---


async def test_an_engine_that_breaks_ends_the_service_and_its_links(tmp_path, caplog):
    worker = ScriptedWorker(tmp_path / "w.sock")
    async with worker:
        async with await GatewayLink.dial(worker.address) as gateway:
            await gateway.of(WorkerStatus)

            def broken(*_, **__):
                raise AssertionError("a law is broken")

            worker.engine.scheduler.plan = broken
            await asyncio.wait_for(gateway.closed.wait(), stretched(5))
        await asyncio.wait_for(worker._task, stretched(3))
        assert isinstance(worker.service.engine_error, AssertionError)
        assert not worker.service.alive
    assert "the engine thread ended" in caplog.text


# --- the faults that other tests rely on ---


@pytest.mark.parametrize("kind", ["crash", "garble"])
async def test_a_scripted_worker_crashes_or_garbles_after_the_tokens_asked_for(tmp_path, kind):
    fault = Fault(kind, after_tokens=5)
    async with (
        ScriptedWorker(tmp_path / "w.sock", tokens_per_s=200, fault=fault) as worker,
        await GatewayLink.dial(worker.address) as gateway,
    ):
        gateway.send(generate_request("r", max_tokens=100))
        await asyncio.wait_for(gateway.closed.wait(), stretched(3))
        assert (gateway.error is not None) == (kind == "garble")
        assert 4 <= len(gateway.tokens("r")) <= 6
        if kind == "crash":
            with pytest.raises(OSError, match=r".*"):
                await GatewayLink.dial(worker.address)


@pytest.mark.parametrize(("kind", "alive"), [("hang", True), ("silence", False)])
async def test_a_scripted_worker_hangs_with_or_without_heartbeats(quick_beats, tmp_path, kind, alive):
    fault = Fault(kind, after_tokens=5)
    async with (
        ScriptedWorker(tmp_path / "w.sock", tokens_per_s=200, fault=fault) as worker,
        await GatewayLink.dial(worker.address) as gateway,
    ):
        gateway.send(generate_request("r", max_tokens=100))
        await gateway.until(lambda _: len(gateway.tokens("r")) >= 4)
        await asyncio.sleep(0.3)
        num_heard = len(gateway.heard)
        await asyncio.sleep(0.5)
        if alive:
            await gateway.until(lambda heard: len(heard) > num_heard)
        later = gateway.heard[num_heard:]
        assert not [m for m in later if not isinstance(m, WorkerStatus | EngineReport)]
        assert bool(later) == alive
        assert isinstance(worker.service, Service)


async def test_a_hang_shows_in_the_age_of_the_last_round_and_idleness_does_not(quick_beats, tmp_path):
    fault = Fault("hang", after_tokens=3)
    async with (
        ScriptedWorker(tmp_path / "w.sock", tokens_per_s=100, fault=fault) as worker,
        await GatewayLink.dial(worker.address) as link,
    ):
        await asyncio.sleep(1.2)
        idle = [m for m in link.heard if isinstance(m, WorkerStatus)][-1]
        assert idle.last_step_age_ms < 1000
        link.send(generate_request("a", list(range(40)), 50))
        await link.until(lambda heard: any(isinstance(m, WorkerStatus) and m.last_step_age_ms > 1500 for m in heard))


async def test_a_stuck_engine_is_logged_once_with_the_place_where_it_stands(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("workers.engine.service.STUCK_S", 0.5)
    fault = Fault("hang", after_tokens=3)
    async with (
        ScriptedWorker(tmp_path / "w.sock", tokens_per_s=100, fault=fault) as worker,
        await GatewayLink.dial(worker.address) as link,
    ):
        assert worker.service.look_at_engine()
        link.send(generate_request("a", list(range(40)), 50))
        async with asyncio.timeout(30):
            while worker.service.look_at_engine():  # noqa: ASYNC110 - the engine is another thread
                await asyncio.sleep(0.1)
        assert not worker.service.look_at_engine()
    [told] = [record for record in caplog.records if getattr(record, "event", "") == "engine_stuck"]
    assert any("fakes.py" in place for place in told.at)


async def test_scripted_speed_is_about_what_was_asked_for(tmp_path):
    async with (
        ScriptedWorker(tmp_path / "w.sock", tokens_per_s=100) as worker,
        await GatewayLink.dial(worker.address) as gateway,
    ):
        started = time.monotonic()
        gateway.send(generate_request("r", max_tokens=30))
        await gateway.of(Finished)
        assert time.monotonic() - started >= 0.3


async def test_logprobs_of_many_prompts_that_end_in_one_step_end_no_link(tmp_path, monkeypatch):
    """Each fits a frame, all of them do not: they came in one, and the link was cut with everybody's streams."""
    monkeypatch.setattr("workers.protocol.frames.MESSAGES.max_bytes", 200_000)
    async with (
        ScriptedWorker(tmp_path / "w.sock", max_batch_tokens=2048) as worker,
        await GatewayLink.dial(worker.address) as gateway,
    ):
        victim = generate_request("victim", max_tokens=200)
        prompt = encode("x" * 200)
        gateway.send(victim)
        gateway.send(*[generate_request(f"r{i}", prompt, 2, prompt_logprobs=20) for i in range(8)])
        await gateway.of(Finished, request_id="victim")
        assert gateway.tokens("victim") == alone(victim)
        for i in range(8):
            await gateway.of(Finished, request_id=f"r{i}")


async def test_many_bytes_of_one_step_end_no_link_of_a_gateway_that_reads(tmp_path, monkeypatch):
    """The texts of a search come in one step: the link was cut, with everybody's streams."""
    monkeypatch.setattr("workers.engine.service.MAX_QUEUED_BYTES", 500_000)
    async with ScriptedWorker(tmp_path / "w.sock") as worker, await GatewayLink.dial(worker.address) as gateway:
        victim = generate_request("victim", max_tokens=400)
        sampling = SamplingParams(seed=0, logprobs=100)
        search = generate_request("search", max_tokens=200, num_choices=8, beams=BeamParams(), sampling=sampling)
        gateway.send(victim, search)
        await gateway.of(Finished, request_id="search")
        frames = [m for m in gateway.heard if isinstance(m, StepFrame)]
        texts = [d for f in frames for d in f.deltas if d.request_id == "search" and d.tokens]
        assert sum(len(msgspec.msgpack.encode(text)) for text in texts) > 2_000_000
        await gateway.of(Finished, request_id="victim")
        assert gateway.tokens("victim") == alone(victim)


class Unread:
    """Stands in for a connection: a gateway leaves `num_queued_bytes` unread."""

    def __init__(self):
        self.num_queued_bytes = 0
        self.is_cut = False

    def send(self, message):
        pass

    def abort(self):
        self.is_cut = True


@pytest.mark.parametrize(
    ("unread", "is_cut"),
    [
        ([99, 0, 99], False),
        ([99, 50, 20, 9], False),
        ([10, 10, 10], False),
        ([10, 99], False),
        ([99, 99], True),
        ([50, 99], True),
        ([99, 50, 60], True),
    ],
)
def test_a_gateway_is_cut_that_has_too_much_unread_at_a_beat_and_no_less_at_the_next(
    tmp_path, monkeypatch, unread, is_cut
):
    monkeypatch.setattr("workers.engine.service.MAX_QUEUED_BYTES", 10)
    service, link = ScriptedWorker(tmp_path / "w.sock").service, Unread()
    service._links[1] = link
    for link.num_queued_bytes in unread:
        assert not link.is_cut
        service._send_heartbeats()
    assert link.is_cut == is_cut


@pytest.mark.parametrize(
    "body",
    [
        b"\x82\xa4type\xa6cancel\xaarequest_id\xa2\xff\xfe",
        b"\x82\xa4type\xa5alive\xa1x" + b"\x91" * 100_000 + b"\x01",
        b"\x82\xa4type\xa4peek\xa6prompt\xdd\xff\xff\xff\xff",
        b"",
    ],
    ids=["no UTF-8", "deep", "an array of 4 G", "empty"],
)
async def test_a_frame_that_cannot_be_read_closes_its_link_alone_and_in_order(worker, body, caplog):
    async with await GatewayLink.dial(worker.address) as good:
        request = generate_request("r", max_tokens=30)
        good.send(request)
        bad = await GatewayLink.dial(worker.address)
        bad.send_raw(struct.pack(">I", len(body)) + body)
        await asyncio.wait_for(bad.closed.wait(), stretched(10))
        await bad.close()
        await good.of(Finished)
        assert good.tokens("r") == alone(request)
    assert "undecodable frame" in caplog.text
    assert "Unhandled exception" not in caplog.text
