"""The GPUs of this machine that each worker sees. It needs no torch: only device files and one variable."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_devices(environ: Mapping[str, str], directory: Path = Path("/dev")) -> list[str]:
    """Returns the devices that this process may use, in CUDA's own notation (numbers or UUIDs)."""
    given = environ.get(VISIBLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    found = [re.fullmatch(r"nvidia(\d+)", path.name) for path in directory.glob("nvidia*")]
    return [str(number) for number in sorted(int(match[1]) for match in found if match)]


def share(devices: list[str], slot: int, num_workers: int, num_ranks: int) -> dict[str, str]:
    """Returns the environment of one worker. It is empty if there are not enough devices for every worker to have its
    own: a worker then takes the devices it finds, or reports those it lacks.
    """
    if num_workers == 1 or len(devices) < num_workers * num_ranks:
        return {}
    return {VISIBLE: ",".join(devices[slot * num_ranks : (slot + 1) * num_ranks])}
