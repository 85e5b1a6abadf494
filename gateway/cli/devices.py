"""The GPUs and the memory that each worker of this machine gets. It needs no torch: device files, file sizes, variables."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from workers.process.weight_files import weight_files

VISIBLE = "CUDA_VISIBLE_DEVICES"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Room:
    """The part of the machine that one worker may use. By default it takes what it finds."""

    devices: tuple[str, ...] = ()
    """Its GPUs, in CUDA's notation. If there are none, the worker sees all of them."""
    memory_share: float | None = None
    """The share of the GPU that this worker and those that started before it on the GPU may use together."""

    @property
    def env(self) -> dict[str, str]:
        found = {VISIBLE: ",".join(self.devices)} if self.devices else {}
        if self.memory_share is not None:
            found["HEADGATE_ENGINE_MEMORY_SHARE"] = f"{self.memory_share:.3f}"
        return found


def visible_devices(environ: Mapping[str, str], directory: Path = Path("/dev")) -> list[str]:
    """Returns the devices that this process may use, in CUDA's own notation (numbers or UUIDs)."""
    given = environ.get(VISIBLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    found = [re.fullmatch(r"nvidia(\d+)", path.name) for path in directory.glob("nvidia*")]
    return [str(number) for number in sorted(int(match[1]) for match in found if match)]


def rooms(
    devices: Sequence[str], weights: Sequence[int], ranks: Sequence[int], share: float, held: Mapping[str, int]
) -> list[Room]:
    """Divides the GPUs among new workers; `weights` has the bytes of each worker's weights, `ranks` the number of GPUs of
    each, and `held` the bytes of weights on the GPUs that are in use. Where enough GPUs are free, every worker has its
    own. Otherwise each GPU is shared: half of `share` by the size of the weights, half equally; of a GPU in use, what is
    left. Workers of several ranks do not share a GPU: they take what they find, or report what they lack.
    """
    if not devices or (len(weights) <= 1 and not held):
        return [Room()] * len(weights)
    free = iter([device for device in devices if device not in held])
    own = [Room(tuple(islice(free, number))) for number in ranks]
    if sum(len(room.devices) for room in own) == sum(ranks):
        return own
    return [Room()] * len(weights) if max(ranks) > 1 else _shared(devices, weights, share, held)


def _shared(devices: Sequence[str], weights: Sequence[int], share: float, held: Mapping[str, int]) -> list[Room]:
    """Gives each worker, the largest first, the GPU with the least weights. A worker that runs holds as KV what its
    weights leave of a GPU, so that its GPU is taken only if none is free.
    """
    on: dict[str, list[int]] = {device: [] for device in devices if device not in held}
    on = on or {device: [] for device in devices}
    for worker in sorted(range(len(weights)), key=lambda worker: (-weights[worker], worker)):
        least = min(on, key=lambda one: (held.get(one, 0) + sum(weights[other] for other in on[one]), len(on[one])))
        on[least].append(worker)
    found = [Room()] * len(weights)
    for device, workers in on.items():
        total, until = sum(weights[one] for one in workers) or 1, 0.0
        for worker in sorted(workers):
            until += share * (weights[worker] / total + 1 / len(workers)) / 2
            found[worker] = Room((device,), share if device in held else until if len(workers) > 1 else None)
    return found


def alone(room: Room, share: float) -> Room:
    """Returns the room of a worker that starts again: the others on its GPU hold their memory already."""
    return room if room.memory_share is None else replace(room, memory_share=share)


def weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(directory))


def in_gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
