"""The workers of one `headgate up`: which slot serves which model, and the sockets and the environment of each.

A slot's number never changes while its worker runs. This module starts and stops workers; it does not know gateways.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.base.home import HomeError
from gateway.cli.addresses import listen_from
from gateway.cli.devices import Room, alone, in_gib, rooms, visible_devices, weight_bytes
from gateway.cli.model import ServedModel
from gateway.cli.start_checks import LIMIT_S
from gateway.cli.supervisor import STOP_LIMIT_S, Spec, Supervisor
from workers.process.free_memory import free_memory

OPS_HOST = "127.0.0.1"
OPS_FIRST_PORT = 9400
"""The port of the first worker; the others have the ports after it (operations.md section 3.1)."""
MEMORY_SHARE = "HEADGATE_ENGINE_MEMORY_SHARE"
TENSOR_PARALLEL = "HEADGATE_ENGINE_TENSOR_PARALLEL"
DEFAULT_SHARE = 0.9
POLL_S = 0.2

Env = Callable[..., Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """One worker's slot, and what it may use."""

    slot: int
    model: ServedModel
    room: Room
    ops: socket.socket
    """The socket for probes and metrics."""
    num_threads: int = 1
    num_ranks: int = 1

    @property
    def name(self) -> str:
        return f"worker-{self.slot}"


@dataclass(frozen=True, slots=True)
class Change:
    """The difference between the workers that run and those that are wanted."""

    new: list[ServedModel]
    """One entry for each worker to start."""
    gone: list[WorkerSlot]


class ModelWorkers:
    def __init__(
        self,
        supervisor: Supervisor,
        run_dir: Path,
        env: Env,
        num_ranks: int = 1,
        num_threads: int | None = None,
        stop_limit_s: float = STOP_LIMIT_S,
    ) -> None:
        """`env` adds what all processes have. Without `num_threads` the cores are shared among the workers."""
        self._supervisor = supervisor
        self._run_dir = run_dir
        self._env = env
        self._num_ranks = num_ranks
        self._num_threads = num_threads
        self._stop_limit_s = stop_limit_s
        self.places: list[WorkerSlot] = []

    @property
    def counts(self) -> dict[str, int]:
        """The number of workers by model."""
        return dict(Counter(place.model.id for place in self.places))

    def change(self, models: Sequence[ServedModel], draining: Collection[str] = ()) -> Change:
        """Compares the workers with other models. A worker of a model whose directory or settings are others is
        replaced by a new one, and so is one that drains, because it takes nothing new.
        """
        kept: list[WorkerSlot] = []
        new: list[ServedModel] = []
        for model in models:
            of_model = [place for place in self.places if place.model.id == model.id and place.name not in draining]
            same = [place for place in of_model if _is_same(place.model, model)]
            kept += same[: model.wanted.num_workers]
            new += [model] * (model.wanted.num_workers - len(same))
        return Change(new, [place for place in self.places if place not in kept])

    def place(self, models: Iterable[ServedModel]) -> list[WorkerSlot]:
        """Places every worker of these models. Raises `HomeError`."""
        return self.place_change(Change([model for model in models for _ in range(model.wanted.num_workers)], []))

    def place_change(self, change: Change) -> list[WorkerSlot]:
        """Gives each new worker a free slot, a socket, and its part of the devices and cores. Raises `HomeError`."""
        wanted, used = change.new, {place.slot for place in self.places}
        slots = [slot for slot in range(len(used) + len(wanted)) if slot not in used]
        devices, ranks = visible_devices(os.environ), [self._ranks_of(model) for model in wanted]
        weights = [weight_bytes(model.path) for model in wanted]
        found = rooms(devices, weights, ranks, self._share(), self._held(devices))
        num_workers = len(used) + len(wanted) - len(change.gone)
        num_threads = self._num_threads or max(1, len(os.sched_getaffinity(0)) // max(1, num_workers))
        sockets = listen_from(OPS_HOST, OPS_FIRST_PORT, len(wanted)) if wanted else []
        parts = zip(slots, wanted, found, sockets, ranks, strict=False)
        new = [WorkerSlot(slot, model, room, ops, num_threads, number) for slot, model, room, ops, number in parts]
        self.places += new
        return new

    def _held(self, devices: Sequence[str]) -> dict[str, int]:
        """Returns the bytes of weights on each GPU that a worker uses. One that sees all GPUs uses the first ones."""
        found = Counter[str]()
        for place in self.places:
            for device in place.room.devices or devices[: place.num_ranks]:
                found[device] += weight_bytes(place.model.path) // place.num_ranks
        return dict(found)

    def _ranks_of(self, model: ServedModel) -> int:
        told = model.wanted.env.get(TENSOR_PARALLEL, "")
        return max(1, int(told)) if told.isdecimal() else self._num_ranks  # the worker refuses another value

    async def start(self, places: Sequence[WorkerSlot]) -> None:
        """Starts workers. Those that share a GPU start one after the other, since each measures what is left."""
        for place in places:
            await self._supervisor.start(self.spec(place))
            if place.room.memory_share is not None:
                await self._until_loaded(place)

    async def _until_loaded(self, place: WorkerSlot) -> None:
        """Waits until the worker answers its probe, which is after it took its memory. Raises `HomeError` if it refuses
        to start, or takes too long.
        """
        import aiohttp  # it takes long to load, and only a shared GPU asks for it

        url = f"http://{OPS_HOST}:{place.ops.getsockname()[1]}/livez"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
            until = time.monotonic() + LIMIT_S
            while True:
                try:
                    async with session.get(url) as answer:
                        await answer.read()
                        return
                except (aiohttp.ClientError, TimeoutError):
                    if refusal := self._supervisor.refusal(place.name):
                        raise HomeError(refusal) from None
                    if time.monotonic() > until:
                        raise HomeError(f"{place.name} has not loaded its model within {LIMIT_S:.0f} s.") from None
                    await asyncio.sleep(POLL_S)

    async def stop(self, places: Sequence[WorkerSlot]) -> None:
        """Drains workers and gives up their slots."""
        await asyncio.gather(*(self._supervisor.remove(place.name) for place in places))
        for place in places:
            place.ops.close()
        self.places = [place for place in self.places if place not in places]

    def close(self) -> None:
        for place in self.places:
            place.ops.close()

    def spec(self, place: WorkerSlot) -> Spec:
        env = {
            **self._env(**{"HEADGATE_THREADS": str(place.num_threads), TENSOR_PARALLEL: str(self._num_ranks)}),
            **place.model.wanted.env,
            "HEADGATE_SLOT": str(place.slot),
            "HEADGATE_MODEL": str(place.model.path),
            "HEADGATE_MODEL_ID": place.model.id,
            "HEADGATE_WORKER_ADDRESS": f"unix:{self._run_dir / place.name}.sock",
            "HEADGATE_OPS_FD": str(place.ops.fileno()),
        }
        return Spec(
            "worker",
            place.name,
            [sys.executable, "-m", "workers.engine"],
            {**env, **place.room.env},
            stop_limit_s=self._stop_limit_s,
            pass_fds=(place.ops.fileno(),),
            restart_env={**env, **alone(place.room, self._share()).env},
            beats=True,
        )

    def told(self) -> list[str]:
        """Returns one line per model: its workers, its weights, and its part of a GPU."""
        lines = {}
        for place in self.places:
            same = [other for other in self.places if other.model.id == place.model.id]
            number = f"{len(same)} workers" if len(same) > 1 else "1 worker"
            line = f"{place.model.id}: {number}, {in_gib(weight_bytes(place.model.path))} of weights each"
            if place.room.devices:
                line += f", GPU {', '.join(device for other in same for device in other.room.devices)}"
            lines[place.model.id] = line
        return list(lines.values())

    def news(self) -> str:
        """Says what each worker does that takes long."""
        return news({place.name: self._supervisor.last_record(place.name) for place in self.places})

    @staticmethod
    def _share() -> float:
        try:
            return float(os.environ.get(MEMORY_SHARE) or DEFAULT_SHARE)
        except ValueError:
            return DEFAULT_SHARE  # the worker refuses the value, and says so


def news(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Says what each worker does that takes long, by the last record of its log: it reads weights, or compiles."""
    parts = []
    for name, record in records.items():
        if record.get("event") == "weights_read":
            parts.append(f"{name} has read {record['share']:.0%} of its weights")
        elif record.get("event") == "kernels_compiling":
            parts.append(f"{name} compiles the kernels of this CPU, which it does once")
    return ", ".join(parts)


def _is_same(one: ServedModel, other: ServedModel) -> bool:
    """Says whether two models have equal workers."""
    return (one.path, dict(one.wanted.env)) == (other.path, dict(other.wanted.env))


def check_memory(models: Sequence[ServedModel], environ: Mapping[str, str] = os.environ) -> None:
    """Refuses models whose weights together are larger than the free memory of a machine without GPUs, before any of
    them is read. Raises `HomeError` with the numbers.
    """
    free = free_memory()
    if len(models) < 2 or free is None or visible_devices(environ):
        return
    sizes = {model.id: weight_bytes(model.path) * model.wanted.num_workers for model in models}
    if sum(sizes.values()) > free:
        parts = ", ".join(f"{name} {in_gib(size)}" for name, size in sizes.items())
        raise HomeError(
            f"The weights of the models need {in_gib(sum(sizes.values()))} of memory ({parts}), and {in_gib(free)} are"
            " free: serve fewer models or workers."
        )
