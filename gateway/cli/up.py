"""`headgate up`: every process of one machine under one supervisor, with embedded defaults.

Home, sockets and Redis come first. Then the models load, and meanwhile everything else is made ready: schema, first tenant,
gateways, jobs. What that needs is imported only then, because a model takes longest. Stopping is the reverse. This module decides no policy of its own: each child has its settings in its environment.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gateway.base.addresses import LIST_A_PROXY, TRUSTED, keys_in_the_clear
from gateway.base.home import Home, HomeError, write_private
from gateway.cli import embedded
from gateway.cli.addresses import listen, listen_from, listen_locally
from gateway.cli.faults import sentence
from gateway.cli.model import DEMO, ServedModel, WantedModel, resolve_all
from gateway.cli.model_workers import OPS_FIRST_PORT, OPS_HOST, Change, ModelWorkers, WorkerSlot, check_memory
from gateway.cli.ready_file import Ready
from gateway.cli.reload import RELOAD
from gateway.cli.start_checks import certified_host, check_file_system, check_redis, check_room, told
from gateway.cli.supervisor import STOP_LIMIT_S, Spec, Supervisor
from gateway.configuration.model_sources import foreign
from workers.process.children.forked import give_back, load, watch_without_threads
from workers.process.tls.certificates import Files

if TYPE_CHECKING:
    from accounting.values.tenant_types import Credentials
    from gateway.cli.gateway_probes import GatewayProbes
    from gateway.cli.preparation import Preparation

PREPARATION, PROBES = "gateway.cli.preparation", "gateway.cli.gateway_probes"
"""They are imported when workers have been started (ADR 117)."""
GATEWAY, JOBS = "gateway.__main__", "workers.jobs.__main__"
"""The modules of the processes that are forked (ADR 104). They are loaded once, and never run in this process."""
AFTER_DRAIN_S = 15.0
JOBS_STOP_S = 35.0
"""The drain of a jobs process takes 25 s, and its Celery worker has 5 s more to end."""
GATEWAYS_OPS_PORT = 9300
"""The port, or the next free one, of all gateways together; each gateway answers for all."""


@dataclass(frozen=True, slots=True)
class Options:
    home: Home
    host: str
    port: int
    num_gateways: int
    ready_file: Path | None
    models: tuple[WantedModel, ...] = (DEMO,)
    models_again: Callable[[], tuple[WantedModel, ...]] | None = None
    """Returns the models that the settings name now, for a reload. If it is None, they do not change."""
    database_url: str | None = None
    redis_url: str | None = None
    migrate: bool = True
    tensor_parallel: int = 1
    num_threads: int | None = None
    """The threads of a worker. If it is None, the cores are shared among the workers."""
    tls: Files | None = None
    """The files of the base URL's certificate, if it has one."""
    drain_s: float = 60.0
    """The longest time for which gateways and workers drain."""

    @property
    def stop_limit_s(self) -> float:
        """The time after which a gateway or worker is killed: its drain, and the settlements that follow."""
        return max(STOP_LIMIT_S, self.drain_s + AFTER_DRAIN_S)


class Up:
    """One run. The constructor holds the open resources, and `run` has the sequence of events."""

    workers_kind = ModelWorkers

    def __init__(self, options: Options) -> None:
        self.options = options
        self.home = options.home
        self.supervisor = Supervisor(self.home.logs, self._write_ready)
        self.stop_asked = asyncio.Event()
        self.reload_asked = asyncio.Event()
        self.socket: socket.socket | None = None
        self.local: socket.socket | None = None
        """The unix socket of the base URL, where that has TLS: jobs and commands of this machine need no certificate."""
        self._host = ""
        """The host of the base URL."""
        self.models: tuple[ServedModel, ...] = ()
        num_ranks, num_threads = options.tensor_parallel, options.num_threads
        self.workers = self.workers_kind(
            self.supervisor, self.home.run, self._env, num_ranks, num_threads, options.stop_limit_s
        )
        self.credentials: Credentials | None = None
        self.gateways: GatewayProbes
        self.preparation: Preparation
        self._jobs_ops: list[socket.socket] = []
        """The socket for metrics of the jobs process."""
        self._gateways_ops: list[socket.socket] = []
        self.redis_url = options.redis_url or embedded.redis_url(self._redis_socket)
        self.broker_url = os.environ.get("HEADGATE_BROKER_URL") or embedded.broker_beside(self.redis_url)
        self.database_url = options.database_url or self.home.database_url

    @property
    def _redis_socket(self) -> Path:
        return self.home.run / "redis.sock"

    @property
    def _local_socket(self) -> Path:
        return self.home.run / "base.sock"

    async def run(self) -> None:
        """Returns after a clean stop. Raises `HomeError`, `SettingsError` or `ChildFailed`."""
        check_file_system(self.home.root, self._journals())
        check_room(self.home.root, self._journals())
        lock = self.home.lock()
        try:
            self._catch_signals()
            self._use_new_threads()
            self.socket = listen(self.options.host, self.options.port)
            self._host = self.socket.getsockname()[0]
            if self.options.tls is not None:
                self._host = certified_host(self.options.tls, self._host)
                self.local = listen_locally(self._local_socket)
            self._warn_of_clear_text(self.socket.getsockname()[0])
            self._gateways_ops = listen_from(OPS_HOST, GATEWAYS_OPS_PORT, 1)
            await self._serve()
        finally:
            self.home.ready.unlink(missing_ok=True)
            self.workers.close()
            for sock in (self.socket, self.local, *self._jobs_ops, *self._gateways_ops):
                if sock is not None:
                    sock.close()
            os.close(lock)

    async def _serve(self) -> None:
        try:
            await self._until_stop(self._start())
            await self._until_stop(self._reload_when_asked())
        finally:
            await self._stop()

    async def _start(self) -> None:
        self.models = await asyncio.to_thread(resolve_all, self.options.models)
        check_memory(self.models)
        for name in ("pepper", "master.key"):
            self.home.read_secret(name)
        is_embedded = self.options.redis_url is None
        if is_embedded:
            await self._start_redis()
        self._tell_gateways()
        places = self.workers.place(self.models)
        self._say(self.workers.told())
        # Models take longest to load, so everything else is made ready meanwhile.
        await asyncio.gather(self.workers.start(places), self._prepare(is_embedded))
        self._jobs_ops = listen_from(OPS_HOST, OPS_FIRST_PORT, 1)
        await self._prepare_forks()
        for slot in range(self.options.num_gateways):
            await self.supervisor.start(self._gateway(slot))
        await self.supervisor.start(self._jobs())
        await self.gateways.wait(lambda slot: self.gateways.serves(slot, self.workers.counts))
        self.supervisor.ready = True
        await self._write_ready()
        assert self.credentials is not None
        self.preparation.show(self.base_url, self.models, self.credentials)
        give_back()

    async def _prepare(self, is_embedded: bool) -> None:
        await self._import_preparation()
        async with told(lambda: "Redis"):
            await check_redis(self.redis_url, is_ours=is_embedded)
        async with told(lambda: "the database"):
            self.credentials = await self.preparation.prepare_database(self.models)
        await self.preparation.replay_unused_slots(self.options.num_gateways)

    async def _import_preparation(self) -> None:
        module, probes = [await asyncio.to_thread(importlib.import_module, name) for name in (PREPARATION, PROBES)]
        migrates = self.options.migrate
        self.preparation = module.Preparation(self.home, self.database_url, self.redis_url, migrates=migrates)
        self.gateways = probes.GatewayProbes(self.home, self.options.num_gateways, self.workers.news)

    async def _prepare_forks(self) -> None:
        """Loads what gateways and jobs have in common with each other, and ends this process's threads: a child would
        lack them.
        """
        async with told(lambda: "the programs to be loaded"):
            await asyncio.to_thread(load, (GATEWAY, JOBS))
        self._threads.shutdown()
        self._use_new_threads()

    def _use_new_threads(self) -> None:
        """Gives the loop threads that can be ended while it runs. With its own it would not run any after their end."""
        self._threads = ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(self._threads)

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
        server, aside = embedded.take_over(self.home.redis, int(time.time()))
        if aside is not None:
            self._say(
                [f"{server} cannot load what a newer or another server wrote. It lies in {aside} and is not needed."]
            )
        command = embedded.server_command(server, self.home.redis, self._redis_socket)
        self._redis_socket.unlink(missing_ok=True)
        await self.supervisor.start(Spec("redis", "redis", command, os.environ, stop_limit_s=10, answers_promptly=True))

    def _journals(self) -> list[Path]:
        num_workers = sum(model.num_workers for model in self.options.models)
        workers = (f"worker-{slot}" for slot in range(num_workers))
        gateways = (f"gateway-{slot}" for slot in range(self.options.num_gateways))
        return [self.home.state / name / "journal" for name in (*workers, *gateways)]

    # --- models that come and go ---

    async def _reload_when_asked(self) -> None:
        """Serves the models that the settings name now, after each signal for it. A fault is said, and what it left."""
        while True:
            await self.reload_asked.wait()
            self.reload_asked.clear()
            began_at, fault = time.monotonic(), ""
            reached = "The models stay as they were"
            try:
                gone = await self._publish()
                reached = "The models are published, but the change is not complete"
                await self._complete(gone)
            except Exception as error:  # noqa: BLE001 - a fault of ours must not end what is served either
                fault = f"{reached}: {sentence(error)[0]}"
                self._say([fault])
            outcome = {"error": fault, "models": [model.id for model in self.models], "began_at": began_at}
            try:
                write_private(self.home.reloaded, msgspec.json.encode(outcome))
            except HomeError as error:  # the disk is full, which must not end what is served
                self._say([str(error)])

    async def _publish(self) -> list[WorkerSlot]:
        """Starts new workers and writes the list of models. Returns the workers that are not wanted any more."""
        wanted = self.options.models_again() if self.options.models_again else self.options.models
        models = await asyncio.to_thread(resolve_all, wanted)
        await asyncio.to_thread(self.preparation.check, models, self.models, foreign(os.environ))
        change = self.workers.change(models, await self.gateways.draining())
        before, self.models = self.models, models
        try:
            self.credentials = await self.preparation.prepare_database(models)
            await self._add(change)
        except BaseException:
            self.models = before
            raise
        return change.gone

    async def _complete(self, gone: Sequence[WorkerSlot]) -> None:
        self.supervisor.signal("gateway", signal.SIGHUP)
        await self.gateways.wait(lambda slot: self.gateways.knows(slot, self.models))
        await self.workers.stop(gone)
        await self._write_ready()
        self._say(["The models are now:", *self.workers.told(), *self.preparation.price_notes])

    async def _add(self, change: Change) -> None:
        """Starts workers, waits until every gateway sees them, and writes the list of models. One that refuses takes all
        of them back.
        """
        new = self.workers.place_change(change)
        try:
            check_room(self.home.root, [self.home.state / place.name / "journal" for place in new])
            await self.workers.start(new)

            async def serves(slot: int) -> bool:
                for place in new:
                    if refusal := self.supervisor.refusal(place.name):
                        raise HomeError(refusal)
                return await self.gateways.serves(slot, self.workers.counts)

            await self.gateways.wait(serves)
            self._tell_gateways()
        except BaseException:
            await self.workers.stop(new)
            raise

    def _tell_gateways(self) -> None:
        sources = {model.id: model.source for model in self.models}
        write_private(self.home.models, msgspec.json.encode(sources))

    def _warn_of_clear_text(self, host: str) -> None:
        """Says on the terminal what gateways say in their logs."""
        if said := keys_in_the_clear(host, is_safe=self.local is not None or bool(os.environ.get(TRUSTED))):
            self._say([f"{said}. {LIST_A_PROXY}"])

    @staticmethod
    def _say(lines: Sequence[str]) -> None:
        print("\n".join(lines), file=sys.stderr, flush=True)

    # --- children ---

    def _env(self, **more: str) -> Mapping[str, str]:
        return {
            **os.environ,
            "HEADGATE_HOME": str(self.home.root),
            "HEADGATE_DATABASE_URL": self.database_url,
            "HEADGATE_REDIS_URL": self.redis_url,
            "HEADGATE_BROKER_URL": self.broker_url,
            "HEADGATE_URL": self.base_url if self.local is None else f"unix://{self._local_socket}",
            "PYTHONUNBUFFERED": "1",
            **more,
        }

    def _gateway(self, slot: int) -> Spec:
        assert self.socket is not None
        fd, ops_fd = self.socket.fileno(), self._gateways_ops[0].fileno()
        local = {} if self.local is None else {"HEADGATE_LOCAL_FD": str(self.local.fileno())}
        local_fds = () if self.local is None else (self.local.fileno(),)
        env = self._env(
            HEADGATE_SLOT=str(slot),
            HEADGATE_LISTEN_FD=str(fd),
            HEADGATE_OPS_FD=str(ops_fd),
            # No load balancer watches the probe of a single machine, so a stop need not wait for one.
            HEADGATE_DRAIN_GRACE_S=os.environ.get("HEADGATE_DRAIN_GRACE_S", "0"),
            HEADGATE_MODELS_FILE=str(self.home.models),
            **local,
        )
        command = [sys.executable, "-m", "gateway"]
        limit_s = self.options.stop_limit_s
        return Spec(
            "gateway",
            f"gateway-{slot}",
            command,
            env,
            stop_limit_s=limit_s,
            pass_fds=(fd, ops_fd, *local_fds),
            entry=GATEWAY,
            beats=True,
        )

    def _jobs(self) -> Spec:
        fd = self._jobs_ops[0].fileno()
        env = self._env(HEADGATE_OPS_FD=str(fd))
        command = [sys.executable, "-m", "workers.jobs"]
        return Spec(
            "jobs",
            "jobs",
            command,
            env,
            stop_limit_s=JOBS_STOP_S,
            lingers_s=JOBS_STOP_S,  # its Celery worker finishes its lines
            pass_fds=(fd,),
            entry=JOBS,
            beats=True,
        )

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
        loop.add_signal_handler(RELOAD, self.reload_asked.set)
        # A terminal that is closed sends it, too.
        hangup = self._on_signal if sys.stdin is not None and sys.stdin.isatty() else self.reload_asked.set
        loop.add_signal_handler(signal.SIGHUP, hangup)

    def _on_signal(self) -> None:
        if self.stop_asked.is_set():
            print("A second signal came, so what still runs is killed.", file=sys.stderr, flush=True)
            self.supervisor.kill_all()
        self.stop_asked.set()

    # --- what the operator sees ---

    @property
    def base_url(self) -> str:
        assert self.socket is not None
        host, port = self._host, self.socket.getsockname()[1]
        scheme = "http" if self.local is None else "https"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def _write_ready(self) -> None:
        if not self.models or self.credentials is None or not self.supervisor.ready:
            return
        pids = self.supervisor.pids
        redis_pids = pids("redis")
        ready = Ready(
            base_url=self.base_url,
            socket="" if self.local is None else str(self._local_socket),
            admin_key=self.credentials.admin_key,
            tenant_id=self.credentials.tenant_id,
            api_key=self.credentials.api_key,
            model=self.models[0].id,
            model_path=str(self.models[0].path),
            models={
                model.id: {
                    "path": str(model.path),
                    "workers": [place.slot for place in self.workers.places if place.model.id == model.id],
                }
                for model in self.models
            },
            processes={"up": os.getpid(), **self.supervisor.processes()},
            metrics={
                "gateway": [_metrics_at(self._gateways_ops[0])],
                "worker": [_metrics_at(place.ops) for place in self.workers.places],
                "jobs": [_metrics_at(self._jobs_ops[0])],
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


async def run(options: Options) -> None:
    watch_without_threads()
    await Up(options).run()


def _metrics_at(sock: socket.socket) -> str:
    return f"http://{OPS_HOST}:{sock.getsockname()[1]}/metrics"
