"""A worker of two processes: it serves, drains, and neither process outlives the other."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from parallel_worker import Worker, gone, is_alive, running
from tiny_models import GREEDY, Driven, drive

from workers.protocol.messages import Finished

pytestmark = pytest.mark.rest


@pytest.fixture
async def start_worker(tmp_path, tiny_model):
    started = []

    async def start(name="llama", **environ):
        worker = await Worker.start(tmp_path, tiny_model(name), **environ)
        started.append(worker)
        return worker

    yield start
    for worker in started:
        await worker.kill()


def listening(pid):
    """Local addresses of the TCP sockets that a process listens on, as /proc has them."""
    links = [path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()]
    own = {link.name.strip("socket:[]") for link in links if link.name.startswith("socket:")}
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return {line[1].partition(":")[0] for line in lines if line[3] == "0A" and line[9] in own}


async def test_two_processes_serve_the_tokens_of_one_and_a_drain_leaves_nobody(start_worker, tiny_model, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "worker-0.999999999.ranks").touch()  # left by a worker that was killed
    worker = await start_worker()
    gateway = await running(worker)
    assert [path.name for path in run.iterdir()] == [f"worker-0.{worker.process.pid}.ranks"]
    for pid in (worker.process.pid, worker.rank_pid):
        assert listening(pid) == {"0100007F"}
    # As of an operator's Ctrl-C or a unit's stop: the signal reaches every process.
    os.kill(worker.rank_pid, signal.SIGTERM)
    os.kill(worker.rank_pid, signal.SIGINT)
    worker.process.send_signal(signal.SIGTERM)
    await gateway.of(Finished, request_id="r", limit_s=60)
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


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_rank_that_hangs_ends_the_worker_when_a_collective_times_out(start_worker):
    worker = await start_worker()
    gateway = await running(worker, 200)
    os.kill(worker.rank_pid, signal.SIGSTOP)
    assert (await worker.ended(50))[0] == 2
    assert gone(worker.rank_pid, 3)
    await gateway.close()


async def test_a_model_that_cannot_be_split_is_one_sentence(start_worker):
    worker = await start_worker("gpt2")
    status, errors = await worker.ended(40)
    assert status == 78
    # Both ranks find it, and the worker names itself if its own is the first to say so.
    assert errors.splitlines()[-1].removeprefix("headgate worker: ") == (
        "The model type 'gpt2' cannot be split over 2 ranks: transformers has no plan that splits its layers."
    )
    told = [line for line in errors.splitlines() if not line.startswith("{")]  # beside the log
    assert sum("gpt2" in line for line in told) == 1
    assert "Traceback" not in errors
