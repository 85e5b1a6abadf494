"""The Celery worker: `python -m workers.jobs.worker`, started by `workers.jobs`. The module has the task, the signals
and the prefork children.

Children learn of a drain through one byte of memory that they share with their parent.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import mmap
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery import Celery, Task, signals
from kombu.exceptions import OperationalError
from opentelemetry.sdk.trace import TracerProvider

from accounting.batches.batches import DOORBELL, RING_EXPIRES_S
from workers.jobs.base import settings as jobs_settings
from workers.jobs.base import tracing
from workers.jobs.base.app import create_celery, leave_out_advice
from workers.jobs.base.settings import HARD_LIMIT_S, STOP_MARGIN_S, JobsSettings
from workers.jobs.base.time_limit import TimeLimit
from workers.jobs.batches.tasks import Look, Turns
from workers.process import logs
from workers.process.children.forked import give_back
from workers.process.children.parent import die_with

logger = logging.getLogger(__name__)


@dataclass
class Process:
    """The state of a worker process, and the byte by which the parent tells its children to drain."""

    settings: JobsSettings
    drain: mmap.mmap
    parent: int = field(default_factory=os.getppid)
    """The jobs process that started this one."""
    provider: TracerProvider | None = None
    turns: Turns = field(default_factory=Turns)
    """The memory of the child that this process is."""

    def is_draining(self) -> bool:
        return self.drain[0] != 0


def build(settings: JobsSettings) -> Celery:
    app = create_celery(settings)
    process = Process(settings, mmap.mmap(-1, 1))
    _connect(app, process)

    @app.task(name=DOORBELL, bind=True)  # type: ignore[untyped-decorator]
    def look(self: Task) -> None:
        assert process.provider is not None
        tracer = process.provider.get_tracer("headgate")
        with tracing.look_span(tracer, self.request.id, self.request.headers or {}) as span:
            with TimeLimit(HARD_LIMIT_S, settings.jobs_pulse) as limit:
                num_left = asyncio.run(Look(settings, process.is_draining, tracer, process.turns, limit).run())
            for _ in range(num_left):
                headers: dict[str, Any] = {}
                tracing.inject(headers, span)
                if not ring(app, headers):
                    break

    return app


def ring(app: Celery, headers: dict[str, Any] | None = None) -> bool:
    """Sends the message that there is work. Returns False if the broker cannot be reached; the sweeper then sends
    another one."""
    try:
        app.send_task(DOORBELL, expires=RING_EXPIRES_S, headers=headers or {}, retry=False, ignore_result=True)
    except (OperationalError, OSError) as error:
        logger.warning("ring_failed", extra={"reason": str(error)[:200]})
        return False
    return True


def _connect(app: Celery, process: Process) -> None:
    def on_child_start(**_: Any) -> None:
        process.provider = tracing.provider()

    def on_child_end(**_: Any) -> None:
        if process.provider is not None:
            process.provider.shutdown()

    def on_shutdown(**_: Any) -> None:
        process.drain[0] = 1
        if os.getppid() != process.parent:
            _end_in(process.settings.drain_s + STOP_MARGIN_S)

    def on_sign_of_life(**_: Any) -> None:
        if process.settings.jobs_pulse is not None:
            process.settings.jobs_pulse.touch()

    def on_logging(**_: Any) -> None:
        logs.configure("INFO")

    def on_start(**_: Any) -> None:
        gc.collect()
        gc.freeze()
        give_back()

    signals.worker_init.connect(on_start, weak=False)
    # By default signals keep weak references only, but these functions must live as long as the process.
    signals.setup_logging.connect(on_logging, weak=False)
    signals.worker_process_init.connect(on_child_start, weak=False)
    signals.worker_process_shutdown.connect(on_child_end, weak=False)
    signals.worker_shutting_down.connect(on_shutdown, weak=False)
    signals.worker_ready.connect(on_sign_of_life, weak=False)
    signals.task_received.connect(on_sign_of_life, weak=False)


def _end_in(seconds: float) -> None:
    """Lets nothing outlive the jobs process for longer than it would have waited: it has died, so nobody else will end
    what hangs. The process group is not killed, because in a shell's pipeline it has others' programs too.
    """

    def end() -> None:
        lists = Path("/proc/self/task").glob("*/children")
        for pid in [*(int(pid) for path in lists for pid in path.read_text().split()), os.getpid()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def main() -> int:
    logs.configure("INFO")  # this comes before Celery's own start, which logs warnings too
    try:
        settings = jobs_settings.load()
    except jobs_settings.SettingsError as error:
        print(f"headgate jobs: {error}", file=sys.stderr)
        return 78
    app = build(settings)
    # Celery says there that it ends, in a line that is no JSON.
    sys.__stdout__ = None  # type: ignore[misc]
    leave_out_advice()
    worker = app.Worker(
        hostname=f"jobs-{settings.jobs_process}@{socket.gethostname()}",
        pool_cls="prefork",
        loglevel="WARNING",
        quiet=True,
        # No child waits for work. One is forked for the first message, others when there is more than it can take, and
        # they end half a minute after the last work.
        autoscale=(settings.jobs_concurrency, 0),
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
    )
    leave_out_advice()
    worker.start()
    return worker.exitcode or 0


if __name__ == "__main__":
    if len(sys.argv) > 1:  # the id of the jobs process that started this one
        die_with(int(sys.argv[1]), signal.SIGTERM)
    raise SystemExit(main())
