"""The gateway's CPU for a plain request in two checkouts that take turns, so that neighbours on the machine touch both.

    python benchmarks/side_by_side.py ../before . --turns 36 --seconds 0.4
    python benchmarks/side_by_side.py . . --pairs 3        # what the machine shows where nothing has changed

Each checkout has a `.venv`. Both run `headgate up` on SQLite with everything on, before a worker that computes nothing
(`gateway_peers.py`), and are asked one after the other, each time in the other order. The clocks of the gateway's threads
say what a turn cost (`/proc/PID/task/*/schedstat`), with the process' own work of that time in it. Two processes of one
program differ by some percent by themselves: `--pairs` starts both anew, the other one first.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gateway_load
import uvloop
from memory import processes

START_S = 300.0
REST_S = 0.05


@dataclass
class Side:
    """One of the two, as it runs."""

    peer: gateway_load.Peer
    pid: int
    clients: gateway_load.Clients
    us: list[float] = field(default_factory=list)
    """Microseconds of the gateway's threads for each request, by turn."""
    num_requests: int = 0

    async def turn(self, seconds: float, in_flight: int) -> None:
        before = thread_ns(self.pid)
        count, _ = await self.clients.until(seconds, in_flight, stream=False, max_tokens=gateway_load.TOKENS)
        await asyncio.sleep(REST_S)  # for what follows the last answers
        self.us.append((thread_ns(self.pid) - before) / 1000 / count)
        self.num_requests += count


def thread_ns(pid: int) -> int:
    """Returns the time that all threads of a process had a core."""
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            total += int((thread / "schedstat").read_text().split()[0])
    return total


@contextlib.contextmanager
def running(tree: Path, scratch: Path) -> Iterator[Side]:
    home, ready_file = scratch / "home", scratch / "ready.json"
    scratch.mkdir()
    script = [str(tree / ".venv/bin/python"), str(tree / "benchmarks/gateway_peers.py")]
    with (scratch / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [*script, "--home", str(home), "--ready-file", str(ready_file)], cwd=tree, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + START_S
        while not ready_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((scratch / "up.log").read_text()[-2000:])
            time.sleep(0.1)
        ready: dict[str, Any] = {**json.loads(ready_file.read_text()), "supervisor": process.pid}
        url, pepper = f"sqlite+aiosqlite:///{home / 'headgate.db'}", (home / "secrets" / "pepper").read_bytes()
        keys = uvloop.run(gateway_load.make_keys(url, pepper, 1))
        port = int(ready["base_url"].rsplit(":", 1)[1].split("/")[0])
        peer = gateway_load.Peer("headgate", port, lambda: processes(ready), keys)
        yield Side(peer, processes(ready)["gateway"], gateway_load.Clients(peer))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


async def compare(sides: Sequence[Side], in_flight: int, told: argparse.Namespace) -> dict[str, Any]:
    """Lets both take turns, and returns their figures and the second's ratio to the first."""
    for side in sides:
        side.us, side.num_requests = [], 0
        await side.clients.until(told.seconds, in_flight, stream=False, max_tokens=gateway_load.TOKENS)
    for turn in range(told.turns):
        for side in sides if turn % 2 else reversed(sides):
            await side.turn(told.seconds, in_flight)
    first, second = (side.us for side in sides)
    ratios = statistics.quantiles([after / before for before, after in zip(first, second, strict=True)], n=4)
    return {
        "in_flight": in_flight,
        "us_median": [round(statistics.median(side.us)) for side in sides],
        "us_least": [round(min(side.us)) for side in sides],
        "per_s": [round(side.num_requests / told.turns / told.seconds) for side in sides],
        "ratio_of_medians": round(statistics.median(second) / statistics.median(first), 3),
        "ratios_of_pairs": [round(ratio, 3) for ratio in ratios],
        "load": round(os.getloadavg()[0], 1),
    }


async def take_turns(sides: Sequence[Side], told: argparse.Namespace) -> list[dict[str, Any]]:
    found = [await compare(sides, in_flight, told) for in_flight in told.in_flight]
    for side in sides:
        side.clients.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trees", type=Path, nargs=2, metavar="CHECKOUT")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[64, 1])
    told = parser.parse_args()
    for pair in range(told.pairs):
        with tempfile.TemporaryDirectory(prefix="headgate-sides-") as directory, contextlib.ExitStack() as stack:
            started = {
                index: stack.enter_context(running(told.trees[index].resolve(), Path(directory) / str(index)))
                for index in ((0, 1) if pair % 2 == 0 else (1, 0))
            }
            for found in uvloop.run(take_turns([started[0], started[1]], told)):
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
