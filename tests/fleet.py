"""A whole installation under the real supervisor: gateways, jobs, Redis, SQL, and workers whose model alone is scripted.

It starts in seconds, so that hundreds of kills are affordable; `running.py` starts `headgate up` with a real model.
Prompts are bytes (`byte_model.py`). Run as a module it is such a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from byte_model import write_byte_model
from fakes import MODEL, ScriptedWorker
from gateways import PEPPER, prepare_home
from load import stretched

from accounting.access import api_keys
from accounting.database.db import Database
from accounting.tenants import tenants
from gateway.cli import embedded
from gateway.cli.supervisor import Spec, Supervisor

HEADGATE = str(Path(sys.executable).parent / "headgate")
READY_S = 90.0
TOKENS_PER_S = 400.0


@dataclass
class Fleet:
    home: Path
    base_url: str
    database_url: str
    supervisor: Supervisor

    def pids(self, kind: str) -> list[int]:
        if kind == "poster":
            return [pid for gateway in self.pids("gateway") for pid in _posters_of(gateway)]
        return self.supervisor.pids(kind)

    async def tenant_key(self, name: str) -> tuple[str, str]:
        """A new tenant's (id, api key)."""
        now, database = int(time.time()), Database(self.database_url)
        async with database.write() as conn:
            tenant = await tenants.create(conn, name, now=now)
            made = await api_keys.create(conn, PEPPER, tenant_id=tenant.id, now=now)
        await database.close()
        return tenant.id, made.value

    async def verified(self, limit_s: float) -> dict[str, Any]:
        """The report of `headgate verify-books`, once it is clean; fails with the last one that is not."""
        deadline = time.monotonic() + stretched(limit_s)
        while True:
            done = await asyncio.to_thread(self._verify)
            if done.returncode == 0:
                return dict(json.loads(done.stdout))
            assert time.monotonic() < deadline, done.stdout + done.stderr
            await asyncio.sleep(0.5)

    def _verify(self) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [HEADGATE, "verify-books", "--json", "--home", str(self.home)],
            text=True,
            check=False,
            capture_output=True,
            timeout=stretched(120),
            env={**os.environ, "HEADGATE_DATABASE_URL": self.database_url},
        )

    async def serving(self, num_gateways: int, num_workers: int) -> None:
        """Waits until each gateway sees each worker."""
        deadline = time.monotonic() + stretched(READY_S)
        for slot in range(num_gateways):
            while await self._num_linked(slot) < num_workers:
                assert time.monotonic() < deadline, f"gateway {slot} does not get ready"
                await asyncio.sleep(0.1)

    async def _num_linked(self, slot: int) -> int:
        connector = aiohttp.UnixConnector(str(self.home / "run" / f"gateway-{slot}.sock"))
        timeout = aiohttp.ClientTimeout(total=2)
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get("http://gateway/readyz") as answer,
            ):
                body = await answer.json()
                return int(body.get("workers", {}).get(MODEL, 0)) if answer.status == 200 else 0
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return 0


@contextlib.asynccontextmanager
async def fleet(home: Path, database_url: str, *, num_gateways: int = 2, num_workers: int = 2) -> AsyncIterator[Fleet]:
    await prepare_home(home, database_url)
    for name in ("run", "logs", "redis"):
        (home / name).mkdir(exist_ok=True, mode=0o700)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as listener:
        listener.set_inheritable(True)
        base_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        supervisor = Supervisor(home / "logs", _nothing)
        found = Fleet(home, base_url, database_url, supervisor)
        try:
            for spec in _specs(found, listener.fileno(), num_gateways, num_workers):
                await supervisor.start(spec)
            await found.serving(num_gateways, num_workers)
            supervisor.ready = True
            yield found
        finally:
            supervisor.begin_stop()
            for kind in ("jobs", "gateway", "worker", "redis"):
                await supervisor.stop(kind)
            await supervisor.close()


async def _nothing() -> None:
    pass


def _posters_of(gateway: int) -> list[int]:
    """One or none: it may be dead."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(") ")[2].split()[1])
            if parent == gateway and b"gateway.journal.poster_process" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            pass  # ended meanwhile
    return found


def _specs(found: Fleet, listener: int, num_gateways: int, num_workers: int) -> list[Spec]:
    redis_socket = found.home / "run" / "redis.sock"
    redis_url = embedded.redis_url(redis_socket)
    inherited = {name: v for name, v in os.environ.items() if not name.startswith("HEADGATE_")}
    env = inherited | {
        "HEADGATE_HOME": str(found.home),
        "HEADGATE_DATABASE_URL": found.database_url,
        "HEADGATE_REDIS_URL": redis_url,
        "HEADGATE_BROKER_URL": embedded.broker_beside(redis_url),
        "HEADGATE_URL": found.base_url,
        "HEADGATE_TEST_TIME_SCALE": "0.1",
    }
    model = write_byte_model(found.home / "model")
    for_gateway = {
        "HEADGATE_LISTEN_FD": str(listener),
        "HEADGATE_DRAIN_GRACE_S": "0",
        "HEADGATE_MODELS": json.dumps({MODEL: {"path": str(model)}}),
    }
    command = embedded.server_command(embedded.find_server(), found.home / "redis", redis_socket)
    specs = [Spec("redis", "redis", command, env, stop_limit_s=10)]
    for slot in range(num_workers):
        worker = [sys.executable, __file__, str(found.home), str(slot), redis_url]
        specs.append(Spec("worker", f"worker-{slot}", worker, inherited, stop_limit_s=20))
    for slot in range(num_gateways):
        here = env | for_gateway | {"HEADGATE_SLOT": str(slot)}
        gateway = [sys.executable, "-m", "gateway"]
        specs.append(Spec("gateway", f"gateway-{slot}", gateway, here, pass_fds=(listener,)))
    jobs = [sys.executable, "-m", "workers.jobs"]
    return [*specs, Spec("jobs", "jobs", jobs, env, stop_limit_s=35)]


async def _serve(home: Path, slot: int, redis_url: str) -> None:
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with ScriptedWorker(
        home / "run" / f"worker-{slot}.sock",
        tokens_per_s=TOKENS_PER_S,
        redis_url=redis_url,
        slot=slot,
        journal_dir=home / f"worker-{slot}-journal",
    ):
        await stopping.wait()


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
