"""A running gateway for clients that run in processes of their own: a scripted model, jobs, and an empty home."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fakes import VECTOR_SIZE, VOCAB_SIZE, ScriptedRunner, ScriptedWorker
from gateways import RunningGateway, running_gateway
from inline_grammars import InlineGrammars
from redis_db import emptied, emptied_broker

from clients import script
from clients.world import World
from workers.engine.values.abilities import Abilities

CONTEXT = 262_144


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    directory = tmp_path_factory.mktemp("clients")
    redis_url, broker_url = emptied(redis_socket, 3), emptied_broker(redis_socket)
    abilities = Abilities(("generate", "embed"), VECTOR_SIZE, reuses_kv=True)
    runner = ScriptedRunner(num_blocks=16_384, block_size=64, max_model_len=CONTEXT, abilities=abilities)
    runner.says = script.says
    vocabulary = [bytes([i]) for i in range(256)] + [b""] * (VOCAB_SIZE - 256)
    worker = ScriptedWorker(
        directory / "w0.sock",
        redis_url=redis_url,
        runner=runner,
        grammars=InlineGrammars(vocabulary),
        max_batch_tokens=16_384,
        journal_dir=directory / "w0",
    )
    home = directory / "clients-home"
    home.mkdir()
    async with (
        running_gateway(directory / "home", redis_url, max_model_len=CONTEXT, broker_url=broker_url) as gateway,
        worker,
    ):
        await gateway.workers(1)
        jobs = _jobs(gateway, broker_url)
        try:
            yield World(gateway, runner, home)
        finally:
            jobs.send_signal(signal.SIGTERM)
            jobs.wait(40)


def _jobs(gateway: RunningGateway, broker_url: str) -> subprocess.Popen[bytes]:
    env = {
        "HEADGATE_HOME": str(gateway.settings.home),
        "HEADGATE_URL": gateway.url,
        "HEADGATE_BROKER_URL": broker_url,
        "HEADGATE_TEST_TIME_SCALE": "0.05",
    }
    with (gateway.settings.home / "jobs.log").open("wb") as log:
        return subprocess.Popen([sys.executable, "-m", "workers.jobs"], env=os.environ | env, stdout=log, stderr=log)
