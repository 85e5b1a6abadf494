"""A jobs process beats for its supervisor while its loop turns, and `headgate up` listens. Its Celery worker is a stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from types import SimpleNamespace

import pytest
from load import stretched

from gateway.cli.up import Up
from workers.jobs.__main__ import Jobs
from workers.jobs.base.settings import JobsSettings


@pytest.fixture
def fd():
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


async def test_the_loop_of_a_jobs_process_beats_until_its_end(fd, tmp_path, monkeypatch):
    settings = JobsSettings(
        home=tmp_path, url="http://127.0.0.1:1", broker_url="redis://", jobs_pulse=tmp_path / "pulse", heartbeat_fd=fd
    )
    jobs = Jobs(settings)

    async def none() -> None:
        return None

    monkeypatch.setattr(jobs, "_spawn", none)
    monkeypatch.setattr(jobs, "_run_tasks", jobs._stop.wait)
    monkeypatch.setattr("workers.process.heartbeat.Heartbeat.__init__.__kwdefaults__", {"beat_s": 0.01, "blocked_s": 1})
    running = asyncio.create_task(jobs.run())
    for _ in range(2):
        await beats(fd)
    jobs._stop.set()
    await running
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(fd)
    await asyncio.sleep(0.05)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(fd)


async def beats(fd: int) -> None:
    has_beaten, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(fd, has_beaten.set)
    async with asyncio.timeout(stretched(10)):
        await has_beaten.wait()
    loop.remove_reader(fd)
    os.eventfd_read(fd)


def test_headgate_up_listens_to_the_beats_of_each_of_its_own_programs():
    with socket.socket() as listener:
        up = SimpleNamespace(
            socket=listener,
            local=None,
            home=SimpleNamespace(models="models.json"),
            options=SimpleNamespace(stop_limit_s=1),
            _jobs_ops=[listener],
            _gateways_ops=[listener],
            _env=lambda **more: more,
        )
        assert [Up._jobs(up).beats, Up._gateway(up, 0).beats] == [True, True]
