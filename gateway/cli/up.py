"""`headgate up`: every process of one machine under one supervisor, with embedded defaults.

The order is the dependency order: home, socket, Redis, schema, first tenant, workers, gateways, jobs. Stopping is the
reverse. This module decides no policy of its own: each child has its settings in its environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from accounting.database import migrate
from accounting.database.db import Database
from accounting.lifecycle.bootstrap import EXAMPLE_RATES, FREE, Credentials, bootstrap
from gateway.base.home import Home, HomeError, write_private
from gateway.cli import embedded
from gateway.cli.addresses import listen, listen_from
from gateway.cli.banner import banner
from gateway.cli.devices import share, visible_devices
from gateway.cli.model import DEMO_MODEL_ID, ServedModel, resolve
from gateway.cli.start_checks import check_redis, check_room, told
from gateway.cli.supervisor import Spec, Supervisor
from gateway.journal.journals import gateway_journals
from gateway.metering.replay import replay

READY_LIMIT_S = 600.0
POLL_S = 0.1
OPS_HOST = "127.0.0.1"
OPS_FIRST_PORT = 9400
"""The port of the first worker; the others have the ports after it (operations.md section 3.1)."""
GATEWAYS_OPS_PORT = 9300
"""The port, or the next free one, of all gateways together; each gateway answers for all."""


@dataclass(frozen=True, slots=True)
class Options:
    home: Home
    host: str
    port: int
    model: str | None
    num_workers: int
    num_gateways: int
    ready_file: Path | None
    database_url: str | None = None
    redis_url: str | None = None
    migrate: bool = True
    tensor_parallel: int = 1
    num_threads: int | None = None
    """The threads of a worker. If it is None, the cores are shared among the workers."""


class Ready(msgspec.Struct, frozen=True):
    """The content of the ready file."""

    base_url: str
    admin_key: str
    tenant_id: str
    api_key: str
    model: str
    model_path: str
    pids: dict[str, list[int] | int | None]
    metrics: dict[str, list[str]]
    """URLs by kind: one for all gateways, one for each worker, one for the jobs process."""


class Up:
    """One run. The constructor holds the open resources, and `run` has the sequence of events."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.home = options.home
        self.supervisor = Supervisor(self.home.logs, self._write_ready)
        self.stop_asked = asyncio.Event()
        self.socket: socket.socket | None = None
        self.model: ServedModel | None = None
        self.credentials: Credentials | None = None
        self._awaited = "the gateways to start"
        """The reason why the start is not finished, for the operator."""
        self._ops: list[socket.socket] = []
        """The sockets for probes and metrics of the workers, then of the jobs process."""
        self._gateways_ops: list[socket.socket] = []
        self.redis_url = options.redis_url or embedded.redis_url(self._redis_socket)
        self.broker_url = os.environ.get("HEADGATE_BROKER_URL") or embedded.broker_beside(self.redis_url)
        self.database_url = options.database_url or self.home.database_url

    @property
    def _redis_socket(self) -> Path:
        return self.home.run / "redis.sock"

    async def run(self) -> None:
        """Returns after a clean stop. Raises `HomeError` or `ChildFailed`."""
        check_room(self.home.root, self._journals())
        lock = self.home.lock()
        try:
            self.socket = listen(self.options.host, self.options.port)
            self._ops = listen_from(OPS_HOST, OPS_FIRST_PORT, self.options.num_workers + 1)
            self._gateways_ops = listen_from(OPS_HOST, GATEWAYS_OPS_PORT, 1)
            self._catch_signals()
            await self._serve()
        finally:
            self.home.ready.unlink(missing_ok=True)
            for sock in (self.socket, *self._ops, *self._gateways_ops):
                if sock is not None:
                    sock.close()
            os.close(lock)

    async def _serve(self) -> None:
        try:
            await self._until_stop(self._start())
            await self._until_stop(self.stop_asked.wait())
        finally:
            await self._stop()

    async def _start(self) -> None:
        self.model = resolve(self.options.model)
        for name in ("pepper", "master.key"):
            self.home.read_secret(name)
        is_embedded = self.options.redis_url is None
        if is_embedded:
            await self._start_redis()
        async with told(lambda: "Redis"):
            await check_redis(self.redis_url, is_ours=is_embedded)
        async with told(lambda: "the database"):
            await self._prepare_database()
        await self._replay_unused_slots()
        for slot in range(self.options.num_workers):
            await self.supervisor.start(self._worker(slot))
        for slot in range(self.options.num_gateways):
            await self.supervisor.start(self._gateway(slot))
        await self.supervisor.start(self._jobs())
        await self._wait_until_serving()
        self.supervisor.ready = True
        await self._write_ready()
        self._banner()

    async def _until_stop(self, work: Coroutine[Any, Any, object]) -> None:
        """Runs `work` to its end, unless a stop is asked for (returns) or a child fails for good (raises)."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self.stop_asked.wait())
        try:
            ends: set[asyncio.Future[Any]] = {task, stop, self.supervisor.failed}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if self.supervisor.failed.done():
                raise self.supervisor.failed.result()
            if task.done():
                task.result()
        finally:
            for other in (task, stop):
                other.cancel()
            await asyncio.gather(task, stop, return_exceptions=True)

    # --- the parts of a start ---

    async def _start_redis(self) -> None:
        command = embedded.server_command(embedded.find_server(), self.home.redis, self._redis_socket)
        self._redis_socket.unlink(missing_ok=True)
        await self.supervisor.start(Spec("redis", "redis", command, os.environ, stop_limit_s=10))

    def _journals(self) -> list[Path]:
        workers = (f"worker-{slot}" for slot in range(self.options.num_workers))
        gateways = (f"gateway-{slot}" for slot in range(self.options.num_gateways))
        return [self.home.state / name / "journal" for name in (*workers, *gateways)]

    async def _prepare_database(self) -> None:
        step = migrate.upgrade if self.options.migrate else migrate.check
        await asyncio.to_thread(step, self.database_url)
        assert self.model is not None
        self.credentials = await bootstrap(
            self.database_url,
            self.home.read_secret("pepper"),
            self.model.id,
            EXAMPLE_RATES if self.model.id == DEMO_MODEL_ID else FREE,
            self._stored_credentials(),
        )
        self._store(self.credentials)

    async def _replay_unused_slots(self) -> None:
        """Replays the journals of gateways that an earlier, larger start left; slots in use do it themselves."""
        slots = gateway_journals(self.home.state)
        unused = sorted(slots.keys() - set(range(self.options.num_gateways)))
        if not unused:
            return
        database = Database(self.database_url)
        try:
            for slot in unused:
                found = await replay(database, self.redis_url, slot, slots[slot])
                if found.voided or found.shipped:
                    print(
                        f"{found.slot} is no longer used: {found.shipped} endings of it came into the books, "
                        f"{found.voided} requests that it left open are void.",
                        file=sys.stderr,
                        flush=True,
                    )
        finally:
            await database.close()

    def _store(self, credentials: Credentials) -> None:
        write_private(self.home.credentials, msgspec.json.encode(credentials))

    def _stored_credentials(self) -> Credentials | None:
        try:
            return msgspec.json.decode(self.home.credentials.read_bytes(), type=Credentials)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError):
            raise HomeError(f"The file {self.home.credentials} cannot be read or is damaged.") from None

    async def _wait_until_serving(self) -> None:
        """Waits until every gateway is ready and sees every worker: then the first request succeeds."""
        try:
            async with asyncio.timeout(READY_LIMIT_S), told(lambda: self._awaited):
                for slot in range(self.options.num_gateways):
                    while not await self._gateway_serves(slot):  # noqa: ASYNC110 - another process has no event
                        await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise HomeError(
                f"The start took more than {READY_LIMIT_S:.0f} s. It waits for {self._awaited}. The logs are in"
                f" {self.home.logs}."
            ) from None

    async def _gateway_serves(self, slot: int) -> bool:
        assert self.model is not None
        path = str(self.home.run / f"gateway-{slot}.sock")
        try:
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as session,
                session.get("http://gateway/readyz", timeout=aiohttp.ClientTimeout(total=2)) as answer,
            ):
                body = await answer.json()
                linked = body.get("workers", {}).get(self.model.id, 0)
                missing = [check["message"] for check in body["checks"] if "message" in check]
                num_workers = self.options.num_workers
                self._awaited = f"gateway {slot}, which has {linked} of {num_workers} workers"
                if missing:
                    self._awaited += ": " + " ".join(missing).rstrip(".")
                return answer.status == 200 and linked >= num_workers
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            self._awaited = f"gateway {slot} to start"
            return False

    # --- children ---

    def _env(self, **more: str) -> Mapping[str, str]:
        return {
            **os.environ,
            "HEADGATE_HOME": str(self.home.root),
            "HEADGATE_DATABASE_URL": self.database_url,
            "HEADGATE_REDIS_URL": self.redis_url,
            "HEADGATE_BROKER_URL": self.broker_url,
            "HEADGATE_URL": self.base_url,
            "PYTHONUNBUFFERED": "1",
            **more,
        }

    def _worker(self, slot: int) -> Spec:
        assert self.model is not None
        shared = max(1, (os.cpu_count() or 1) // self.options.num_workers)
        num_ranks = self.options.tensor_parallel
        env = self._env(
            HEADGATE_SLOT=str(slot),
            HEADGATE_MODEL=str(self.model.path),
            HEADGATE_MODEL_ID=self.model.id,
            HEADGATE_WORKER_ADDRESS=f"unix:{self.home.run / f'worker-{slot}.sock'}",
            HEADGATE_OPS_FD=str(self._ops[slot].fileno()),
            HEADGATE_THREADS=str(self.options.num_threads or shared),
            HEADGATE_ENGINE_TENSOR_PARALLEL=str(num_ranks),
            **share(visible_devices(os.environ), slot, self.options.num_workers, num_ranks),
        )
        fds = (self._ops[slot].fileno(),)
        return Spec("worker", f"worker-{slot}", [sys.executable, "-m", "workers.engine"], env, pass_fds=fds)

    def _gateway(self, slot: int) -> Spec:
        assert self.model is not None and self.socket is not None
        fd, ops_fd = self.socket.fileno(), self._gateways_ops[0].fileno()
        env = self._env(
            HEADGATE_SLOT=str(slot),
            HEADGATE_LISTEN_FD=str(fd),
            HEADGATE_OPS_FD=str(ops_fd),
            # No load balancer watches the probe of a single machine, so a stop need not wait for one.
            HEADGATE_DRAIN_GRACE_S=os.environ.get("HEADGATE_DRAIN_GRACE_S", "0"),
            HEADGATE_MODELS=json.dumps({self.model.id: {"path": str(self.model.path)}}),
        )
        return Spec("gateway", f"gateway-{slot}", [sys.executable, "-m", "gateway"], env, pass_fds=(fd, ops_fd))

    def _jobs(self) -> Spec:
        fd = self._ops[-1].fileno()
        env = self._env(HEADGATE_OPS_FD=str(fd))
        command = [sys.executable, "-m", "workers.jobs"]
        return Spec("jobs", "jobs", command, env, stop_limit_s=35, pass_fds=(fd,))

    # --- the end ---

    async def _stop(self) -> None:
        """Stops the jobs process first (it is a client), then the gateways (they drain), then the processes that those
        needed.
        """
        self.supervisor.begin_stop()
        if self.supervisor.ready:
            print("\nDraining: running requests finish, and the ledger is completed.", file=sys.stderr, flush=True)
        for kind in ("jobs", "gateway", "worker", "redis"):
            await self.supervisor.stop(kind)
        await self.supervisor.close()

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        if self.stop_asked.is_set():
            print("A second signal came, so what still runs is killed.", file=sys.stderr, flush=True)
            self.supervisor.kill_all()
        self.stop_asked.set()

    # --- what the operator sees ---

    @property
    def base_url(self) -> str:
        assert self.socket is not None
        host, port = self.socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    async def _write_ready(self) -> None:
        if self.model is None or self.credentials is None or not self.supervisor.ready:
            return
        pids = self.supervisor.pids
        redis_pids = pids("redis")
        ready = Ready(
            base_url=self.base_url,
            admin_key=self.credentials.admin_key,
            tenant_id=self.credentials.tenant_id,
            api_key=self.credentials.api_key,
            model=self.model.id,
            model_path=str(self.model.path),
            metrics={
                "gateway": [_metrics_at(self._gateways_ops[0])],
                "worker": [_metrics_at(sock) for sock in self._ops[:-1]],
                "jobs": [_metrics_at(self._ops[-1])],
            },
            pids={
                **{kind: pids(kind) for kind in ("gateway", "worker", "jobs")},
                "redis": redis_pids[0] if redis_pids else None,
            },
        )
        content = msgspec.json.encode(ready)
        write_private(self.home.ready, content)
        if self.options.ready_file is not None:
            write_private(self.options.ready_file.absolute(), content)

    def _banner(self) -> None:
        assert self.model is not None and self.credentials is not None
        print(banner(self.base_url, self.model.id, self.credentials, self.home.root), flush=True)
        if self.credentials.fresh:
            self._store(msgspec.structs.replace(self.credentials, fresh=False))


async def run(options: Options) -> None:
    await Up(options).run()


def _metrics_at(sock: socket.socket) -> str:
    return f"http://{OPS_HOST}:{sock.getsockname()[1]}/metrics"
