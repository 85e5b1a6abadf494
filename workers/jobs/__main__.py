"""`python -m workers.jobs`: the Celery worker as a child process, with the sweeper, the sender of webhooks, the restarts
of responses and the watchdog.

At SIGTERM lines in flight finish (up to 25 s), claims are released, and the process exits. The worker is restarted when
it dies, and when work waits that it does not receive (after a broker's restart a consumer may be connected but receive
nothing, a known fault of consumers).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import uuid
from pathlib import Path

from celery import Celery
from prometheus_client import CollectorRegistry, disable_created_metrics
from sqlalchemy.exc import SQLAlchemyError

from accounting.batches import claims
from accounting.batches.batch_figures import batch_figures
from accounting.database.db import Database
from workers.jobs import worker as celery_worker
from workers.jobs.base import ops
from workers.jobs.base import settings as jobs_settings
from workers.jobs.base.app import create_celery
from workers.jobs.base.settings import STOP_MARGIN_S, JobsSettings
from workers.jobs.base.tally import Tally
from workers.jobs.base.time_limit import excused_until
from workers.jobs.batches.batch_metrics import EVERY_S, BatchMetrics
from workers.jobs.batches.sweeper import Sweeper
from workers.jobs.responses.restarts import Restarts
from workers.jobs.webhooks.sender import Sender
from workers.jobs.worker import ring
from workers.process import logs
from workers.process.children.forked import Forked, fork, load, may_fork, watch_without_threads
from workers.process.heartbeat import Heartbeat
from workers.process.rounds import repeat, within

logger = logging.getLogger(__name__)

START_S = 60.0
"""The seconds that a Celery worker has to become ready."""
MAX_RESTART_S = 30.0
PARTS_OF_CELERY = (
    *("celery.apps.worker", "celery.worker.consumer", "celery.concurrency.prefork"),
    "kombu.transport.redis",
)
"""Celery loads these when it starts. Loaded before the fork, its processes share them."""


class Jobs:
    def __init__(self, settings: JobsSettings) -> None:
        assert settings.jobs_pulse is not None
        self._settings = settings
        self._pulse: Path = settings.jobs_pulse
        self._celery: Celery = create_celery(settings)
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no type for it
        self.registry = CollectorRegistry()
        self._tally = Tally(settings.counts_file)
        self._metrics = BatchMetrics(self._tally, self._pulse)
        self.registry.register(self._metrics)
        self._stop = asyncio.Event()
        self._worker: asyncio.subprocess.Process | Forked | None = None
        self._spawned = 0.0
        self._waiting_since: float | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        watch_without_threads()
        # It is the first of all, because it can share this process's memory as long as there are no threads.
        self._worker = await self._spawn()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        heartbeat = Heartbeat(self._settings.heartbeat_fd)
        heartbeat.begin()  # it has a thread, so it comes after the fork
        try:
            with ops.listening(self._settings.ops_bind, self._settings.ops_fd, self.registry):
                await self._run_tasks()
        finally:
            heartbeat.end()
        self._pulse.unlink(missing_ok=True)
        self._tally.clear()

    async def _run_tasks(self) -> None:
        database = Database(self._settings.sql_url)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_worker())
                sender = Sender(self._settings, database, registry=self.registry)
                others = (
                    self._sweep(database),
                    self._count_batches(database),
                    self._restart_responses(database),
                    sender.run(),
                )
                tasks = [group.create_task(other) for other in others]
                await self._stop.wait()
                for task in tasks:
                    task.cancel()
        finally:
            await database.close()

    # The Celery worker

    async def _keep_worker(self) -> None:
        backoff_s = 0.5
        while not self._stop.is_set():
            started = time.monotonic()
            assert self._worker is not None
            await self._until_it_ends_or_stop(self._worker)
            if self._stop.is_set():
                break
            logger.error("celery_worker_ended", extra={"code": self._worker.returncode})
            backoff_s = 0.5 if time.monotonic() - started > 60 else min(2 * backoff_s, MAX_RESTART_S)
            await within(self._stop, backoff_s)
            if not self._stop.is_set():
                self._worker = await self._spawn()
        if self._worker is not None:
            await self._end_worker(self._worker)

    async def _spawn(self) -> asyncio.subprocess.Process | Forked:
        """Starts the worker: at first by a fork, later by an exec."""
        env = {
            **os.environ,
            "HEADGATE_JOBS_PROCESS": self._settings.jobs_process,
            "HEADGATE_JOBS_PULSE": str(self._pulse),
        }
        self._pulse.unlink(missing_ok=True)
        self._spawned = time.time()
        if self._worker is None and may_fork():
            load(PARTS_OF_CELERY)
            return fork(celery_worker.main, "celery", env=env, death_signal=signal.SIGTERM)
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "workers.jobs.worker", str(os.getpid()), env=env
        )

    async def _until_it_ends_or_stop(self, worker: asyncio.subprocess.Process | Forked) -> None:
        ends = asyncio.ensure_future(worker.wait())
        stop = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait((ends, stop), return_when=asyncio.FIRST_COMPLETED)
        for task in (ends, stop):
            task.cancel()

    async def _end_worker(self, worker: asyncio.subprocess.Process | Forked) -> None:
        if worker.returncode is not None:
            return
        # Celery's warm shutdown ends with its last task, and tasks here end within drain_s. Its soft shutdown (SIGQUIT)
        # would sleep through the whole time, idle or not.
        worker.terminate()
        try:
            async with asyncio.timeout(self._settings.drain_s + STOP_MARGIN_S):
                await worker.wait()
        except TimeoutError:
            worker.kill()
            await worker.wait()

    # The sweeper and the watchdog

    async def _sweep(self, database: Database) -> None:
        sweeper = Sweeper(self._settings, database)

        async def sweep() -> None:
            swept = await sweeper.sweep()
            self._metrics.num_expired += swept.num_expired
            for _ in range(swept.num_rings):
                if not await asyncio.to_thread(ring, self._celery):
                    break
            self._watch(swept.num_rings > 0 and not swept.is_busy)
            await sweeper.purge_files()

        def not_swept(error: Exception) -> None:
            logger.error("sweep_failed", exc_info=error)

        await repeat(self._settings.sweep_s, sweep, forgives=(SQLAlchemyError, OSError), on_failure=not_swept)

    async def _count_batches(self, database: Database) -> None:
        async def count() -> None:
            async with database.read() as conn:
                self._metrics.figures = await batch_figures(conn, await claims.now_ms(conn))

        def not_counted(error: Exception) -> None:
            logger.warning("batches_not_counted", extra={"reason": str(error)[:200]})

        await repeat(EVERY_S, count, forgives=(SQLAlchemyError, OSError), on_failure=not_counted)

    async def _restart_responses(self, database: Database) -> None:
        restarts = Restarts(self._settings, database)

        def not_looked(error: Exception) -> None:
            logger.warning("responses_not_looked_at", extra={"reason": str(error)[:200]})

        await repeat(self._settings.sweep_s, restarts.look, forgives=(SQLAlchemyError, OSError), on_failure=not_looked)

    def _watch(self, is_waiting: bool) -> None:
        """Kills the worker, so that it is restarted, if work waits, no chunk runs, and for `deaf_s` the worker has
        received nothing and none of its children got on."""
        now = time.time()
        self._waiting_since = (self._waiting_since or now) if is_waiting else None
        if self._waiting_since is None or self._worker is None:
            return
        try:
            heard = self._pulse.stat().st_mtime
        except FileNotFoundError:  # it is still starting, which no time scale makes faster
            heard = self._spawned + START_S
        seen = max(heard, self._waiting_since, excused_until(self._pulse))
        if now - seen >= self._settings.deaf_s:
            logger.error("celery_worker_deaf", extra={"silent_s": round(now - heard)})
            if self._worker.returncode is None:
                self._worker.kill()  # it runs no chunk, and a process that hangs may not react to a SIGTERM


def main() -> int:
    logs.configure("INFO")
    try:
        settings = jobs_settings.load()
        for name in ("pepper", "master.key"):
            settings.secret(name)
    except jobs_settings.SettingsError as error:
        print(f"headgate jobs: {error}", file=sys.stderr)
        return os.EX_CONFIG
    name = uuid.uuid4().hex[:12]
    run_dir = settings.home / "run"
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    settings = settings.model_copy(update={"jobs_process": name, "jobs_pulse": run_dir / f"jobs-{name}.pulse"})
    jobs = Jobs(settings)
    asyncio.run(jobs.run())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
