"""Two ranks over NCCL, each on a GPU of its own: the same process tests as over gloo."""

from __future__ import annotations

import os
import signal

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs two CUDA devices: each rank has its own", allow_module_level=True)

from parallel_worker import Worker, gone, is_alive, running
from tiny_models import TinyModel

from workers.protocol.messages import Finished


@pytest.fixture
async def start_worker(tmp_path):
    started = []
    model = TinyModel.make("llama", tmp_path / "tiny")

    async def start(size):
        worker = await Worker.start(
            tmp_path,
            model,
            HEADGATE_ENGINE_DEVICE="cuda",
            HEADGATE_ENGINE_DTYPE="float32",
            HEADGATE_ENGINE_BLOCK_SIZE="16",
            HEADGATE_ENGINE_TENSOR_PARALLEL=str(size),
        )
        started.append(worker)
        return worker

    yield start
    for worker in started:
        await worker.kill()


async def tokens_of(worker):
    gateway = await running(worker)
    await gateway.of(Finished, request_id="r", limit_s=30)
    worker.process.send_signal(signal.SIGTERM)
    assert (await worker.ended(20))[0] == 0
    await gateway.close()
    return gateway.tokens("r")


async def test_two_devices_draw_the_tokens_of_one_and_a_drain_leaves_nobody(start_worker):
    alone = await tokens_of(await start_worker(1))
    worker = await start_worker(2)
    assert await tokens_of(worker) == alone
    assert not is_alive(worker.rank_pid)


async def test_a_rank_that_dies_ends_a_worker_that_waits_for_it_in_nccl(start_worker):
    worker = await start_worker(2)
    gateway = await running(worker, 200)
    os.kill(worker.rank_pid, signal.SIGKILL)
    assert (await worker.ended(5))[0] == 2
    await gateway.close()


async def test_no_rank_outlives_a_killed_worker_in_nccl(start_worker):
    worker = await start_worker(2)
    gateway = await running(worker, 200)
    worker.process.kill()
    assert gone(worker.rank_pid, 3)
    await gateway.close()
