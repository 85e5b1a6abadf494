"""`headgate up` as it starts by default, but for the model: its worker draws letters instead of computing.

    python benchmarks/mock_server.py --home /tmp/home --ready-file /tmp/ready.json

Gateway, poster, jobs, embedded Redis and supervisor are the real processes, and so are the worker's scheduler, cache,
journal and protocol; what is measured beside it is everything but the arithmetic of a model.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from byte_model import write_byte_model
from fakes import ScriptedRunner, ScriptedWorker

from gateway.base.home import Home
from gateway.cli.model import WantedModel
from gateway.cli.model_workers import ModelWorkers, WorkerSlot
from gateway.cli.supervisor import Spec
from gateway.cli.up import Options, Up

MODEL = "mock"
WORKER = "worker"
STEP_S = "MOCK_STEP_S"
"""The variable with the seconds of a step. Without it the worker is as fast as it can be."""


class MockWorkers(ModelWorkers):
    """Workers that are this script's."""

    def spec(self, slot: WorkerSlot) -> Spec:
        return dataclasses.replace(super().spec(slot), command=[sys.executable, __file__, WORKER])


class UpWithMock(Up):
    workers_kind = MockWorkers

    @staticmethod
    def model(home: Path) -> str:
        """Returns the directory or the name of the model that is served."""
        return str(write_model(home / MODEL))


def write_model(directory: Path) -> Path:
    write_byte_model(directory)
    (directory / "model.safetensors").touch()  # a model has weights; nobody reads these
    return directory


async def up(home: Path, ready_file: Path, kind: type[UpWithMock]) -> None:
    """Runs until a signal."""
    Home(home).prepare()
    options = Options(
        home=Home(home),
        host="127.0.0.1",
        port=0,
        models=(WantedModel(kind.model(home)),),
        num_gateways=1,
        ready_file=ready_file,
        database_url=os.environ.get("HEADGATE_DATABASE_URL"),
        redis_url=os.environ.get("HEADGATE_REDIS_URL"),
    )
    await kind(options).run()


async def serve_worker() -> None:
    """Runs until a signal."""
    address = Path(os.environ["HEADGATE_WORKER_ADDRESS"].removeprefix("unix:"))
    journal = Home(Path(os.environ["HEADGATE_HOME"])).state / "worker-0" / "journal"
    runner = ScriptedRunner(step_s=float(os.environ.get(STEP_S, "0")))
    runner.steps = collections.deque(maxlen=1)  # type: ignore[assignment]  # tests look at all of them
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    redis_url = os.environ["HEADGATE_REDIS_URL"]
    async with ScriptedWorker(address, redis_url=redis_url, model=MODEL, runner=runner, journal_dir=journal):
        await stop.wait()


def main() -> None:
    if sys.argv[1:] == [WORKER]:
        asyncio.run(serve_worker())
        return
    serve(UpWithMock, sys.argv[1:])


def serve(kind: type[UpWithMock], arguments: list[str]) -> None:
    """Runs until a signal."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--ready-file", type=Path, required=True)
    told = parser.parse_args(arguments)
    asyncio.run(up(told.home.resolve(), told.ready_file.resolve(), kind))


if __name__ == "__main__":
    main()
