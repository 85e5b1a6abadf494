"""A worker of two processes: it serves, drains, and neither process outlives the other."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time

import pytest
from fakes import generate_request
from gateway_link import GatewayLink
from tiny_models import GREEDY, Driven, drive

from workers.protocol.messages import Finished, Hello


class Worker:
    def __init__(self, process, directory):
        self.process = process
        self.directory = directory
        self.rank_pid = 0
        self.lines = []

    async def until(self, event):
        """Reads the log up to an event."""
        while True:
            line = await asyncio.wait_for(self.process.stderr.readline(), 40)
            assert line, f"the worker ended: {self.lines}"
            self.lines.append(line.decode())
            record = json.loads(line)
            self.rank_pid = record.get("rank_pid", self.rank_pid)
            if record["event"] == event:
                return

    async def ended(self, limit_s):
        """The exit status and what it said since; fails if that takes longer."""
        _, errors = await asyncio.wait_for(self.process.communicate(), limit_s)
        return self.process.returncode, errors.decode()


def is_alive(pid):
    """A zombie, of a parent that was killed, is not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid, limit_s):
    deadline = time.monotonic() + limit_s
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_alive(pid)


@pytest.fixture
async def start_worker(tmp_path, tiny_model):
    started = []

    async def start(name="llama", **environ):
        clean = {k: v for k, v in os.environ.items() if not k.startswith("HEADGATE_")}
        told = {
            "HEADGATE_HOME": str(tmp_path),
            "HEADGATE_THREADS": "2",
            "HEADGATE_OPS_BIND": "127.0.0.1:0",
            "HEADGATE_MODEL": str(tiny_model(name).directory),
            "HEADGATE_WORKER_ADDRESS": f"unix:{tmp_path}/w.sock",
            "HEADGATE_ENGINE_NUM_BLOCKS": "64",
            "HEADGATE_ENGINE_TENSOR_PARALLEL": "2",
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "workers.engine",
            env=clean | told | environ,
            stderr=asyncio.subprocess.PIPE,
        )
        worker = Worker(process, tmp_path)
        started.append(worker)
        return worker

    yield start
    for worker in started:
        if worker.process.returncode is None:
            worker.process.kill()
            await worker.process.wait()
        if worker.rank_pid and is_alive(worker.rank_pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.rank_pid, signal.SIGKILL)


async def running(worker, num_tokens=60):
    """A gateway with a request in the middle of its stream."""
    await worker.until("worker_ready")
    gateway = await GatewayLink.dial(f"unix:{worker.directory}/w.sock")
    hello = await gateway.of(Hello)
    request = generate_request("r", range(3, 20), num_tokens, sampling=GREEDY, root=hello.root)
    gateway.send(request)
    await gateway.until(lambda _: gateway.tokens("r"))
    return gateway


async def test_two_processes_serve_the_tokens_of_one_and_a_drain_leaves_nobody(
    start_worker, tiny_model, tmp_path
):
    run = tmp_path / "run"
    run.mkdir()
    (run / "worker-0.999999999.ranks").touch()  # left by a worker that was killed
    worker = await start_worker()
    gateway = await running(worker)
    assert [path.name for path in run.iterdir()] == [f"worker-0.{worker.process.pid}.ranks"]
    # As of an operator's Ctrl-C or a unit's stop: the signal reaches every process.
    os.kill(worker.rank_pid, signal.SIGTERM)
    os.kill(worker.rank_pid, signal.SIGINT)
    worker.process.send_signal(signal.SIGTERM)
    await gateway.of(Finished, request_id="r", limit_s=30)
    assert (await worker.ended(10))[0] == 0
    assert not is_alive(worker.rank_pid)
    assert list(run.iterdir()) == []
    alone = Driven(list(range(3, 20)), GREEDY)
    drive(tiny_model("llama").runner(), [alone], 60)
    assert gateway.tokens("r") == alone.output
    await gateway.close()


async def test_a_rank_that_dies_ends_the_worker(start_worker):
    worker = await start_worker()
    gateway = await running(worker, 200)
    os.kill(worker.rank_pid, signal.SIGKILL)
    status, errors = await worker.ended(5)
    assert status == 2
    assert "Rank 1 of 2 ended with signal SIGKILL." in errors
    await gateway.close()


@pytest.mark.parametrize("serving", [False, True])
async def test_no_rank_outlives_a_killed_worker(start_worker, serving):
    worker = await start_worker()
    if serving:
        gateway = await running(worker, 200)
        await gateway.close()
    else:
        await worker.until("rank_started")
    worker.process.kill()
    assert gone(worker.rank_pid, 3)


async def test_a_rank_that_dies_at_start_is_one_sentence(start_worker):
    worker = await start_worker()
    await worker.until("rank_started")
    os.kill(worker.rank_pid, signal.SIGKILL)
    status, errors = await worker.ended(5)
    assert (status, errors) == (2, "Rank 1 of 2 ended with signal SIGKILL.\n")


async def test_a_model_that_cannot_be_split_is_one_sentence(start_worker):
    worker = await start_worker("phi3")
    status, errors = await worker.ended(40)
    assert status == 78
    assert errors.splitlines()[-1] == (
        "The model type 'phi3' cannot be split over 2 ranks: its plan splits model.layers.0.self_attn.o_proj as"
        " rowwise_split_input, and not by heads."
    )
    assert errors.count("phi3") == 1
    assert "Traceback" not in errors
