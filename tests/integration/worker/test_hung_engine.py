"""A real worker whose engine thread stands still while its loop turns is killed by its supervisor and serves again."""

from __future__ import annotations

import asyncio
import json
import os
import select
import sys
import time

import pytest
from byte_model import tokenizer_spec

from gateway.cli.heartbeats import MAX_SILENT
from gateway.cli.supervisor import Spec, Supervisor

pytestmark = pytest.mark.rest

NEVER_S = 3600.0
STUCK_S = 3.0
WORKER = """
import pathlib, sys, time
from workers.engine import __main__ as worker, engine, service
service.STUCK_S = float(sys.argv[2])
step, place = engine.Engine.step, pathlib.Path(sys.argv[1])

def blocked(self, events=()):
    until = time.monotonic() + (float(place.read_text()) if place.exists() else 0)
    while time.monotonic() < until:
        time.sleep(0.05)
    return step(self, events)

engine.Engine.step = blocked
sys.exit(worker.main())
"""
"""A worker whose steps take as many seconds longer as the file says."""


@pytest.fixture
async def supervisor(tmp_path):
    async def on_change() -> None:
        one.changes.append(1)

    one = Supervisor(tmp_path, on_change, NEVER_S)
    one.changes, one.ready = [], True
    yield one
    one.kill_all()
    await one.close()


async def until(condition, limit_s: float = 90.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.05)


def has_beaten(supervisor) -> bool:
    return bool(select.select([supervisor._children[0].heartbeats.fd], [], [], 0)[0])


def look(supervisor) -> None:
    supervisor._looked_at = time.monotonic() - NEVER_S
    supervisor._end_hung()


async def test_a_worker_whose_engine_hangs_is_killed_with_the_stack_in_its_log_and_a_long_step_is_not(
    supervisor, tmp_path
):
    from tiny_models import TinyModel

    model = TinyModel.make("llama", tmp_path / "tiny")
    (model.directory / "tokenizer.json").write_text(json.dumps(tokenizer_spec()))
    blocked, log = tmp_path / "blocked", tmp_path / "worker-0.log"
    env = {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")} | {
        "HEADGATE_HOME": str(tmp_path),
        "HEADGATE_THREADS": "1",
        "HEADGATE_MODEL": str(model.directory),
        "HEADGATE_WORKER_ADDRESS": f"unix:{tmp_path}/w.sock",
        "HEADGATE_OPS_BIND": "127.0.0.1:0",
        "HEADGATE_ENGINE_NUM_BLOCKS": "64",
    }
    command = [sys.executable, "-c", WORKER, str(blocked), str(STUCK_S)]
    await supervisor.start(Spec("worker", "worker-0", command, env, stop_limit_s=20, beats=True))
    await until(lambda: "worker_ready" in log.read_text())
    (pid,) = supervisor.pids("worker")
    blocked.write_text(str(STUCK_S / 3))  # each step takes a second: long, but honest
    for _ in range(4):
        look(supervisor)
        await until(lambda: has_beaten(supervisor))
        await asyncio.sleep(1)
    assert "engine_stuck" not in log.read_text()
    blocked.write_text("3600")
    await until(lambda: "engine_stuck" in log.read_text())
    await asyncio.sleep(1.5)  # the loop turns, and does not beat any more
    for _ in range(MAX_SILENT + 1):
        look(supervisor)
    blocked.unlink()
    await until(lambda: supervisor.changes)
    assert supervisor.pids("worker") != [pid]
    stuck = json.loads(next(line for line in log.read_text().splitlines() if "engine_stuck" in line))
    assert any(place.endswith(" blocked") for place in stuck["at"])
    await until(lambda: log.read_text().count("worker_ready") == 2)
