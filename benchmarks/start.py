"""How long `headgate up` takes until a request would succeed, and what it takes while nobody asks: memory and processor
time by process, for a first and a second start with the demo model.

Memory is the proportional set size: what several processes share is divided among them, so the sum is what the machine
gives. Under the load of others the wall time says little; the processor time until ready, divided by the cores, is the
least that it could have been.

    python benchmarks/start.py [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gateway.cli import processes

MOST_MB, MOST_CPU, MOST_READY_S = 250, 0.01, 5.0
"""The targets: memory without the worker, share of a core of everything while idle, time until ready."""
LIMIT_S = 300.0


def started(home: Path, *more: str) -> tuple[subprocess.Popen[bytes], float]:
    """Starts Headgate. Returns its process and the seconds until it was ready."""
    ready = home / "ready.json"
    ready.unlink(missing_ok=True)
    command = [
        str(Path(sys.executable).parent / "headgate"),
        "up",
        "--home",
        str(home),
        "--port",
        "0",
        "--ready-file",
        str(ready),
    ]
    began = time.monotonic()
    process = subprocess.Popen([*command, *more], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not ready.exists():
        if process.poll() is not None or time.monotonic() - began > LIMIT_S:
            process.kill()
            assert process.stderr is not None
            raise SystemExit(f"It did not start: {process.stderr.read().decode()[-500:]}")
        time.sleep(0.02)
    return process, time.monotonic() - began


def by_process(home: Path) -> dict[str, list[processes.Process]]:
    """Returns every process of a home, with its own children, by the name of the process that `up` has started."""
    named: dict[str, int] = json.loads((home / "ready.json").read_bytes())["processes"]
    found = {}
    for name, pid in named.items():
        pids = [pid] if name == "up" else [pid, *processes.children(pid)]
        found[name] = [one for one in map(processes.look, pids) if one is not None]
    return found


def measured(home: Path, idle_s: float, settle_s: float) -> dict[str, Any]:
    process, ready_s = started(home)
    try:
        at_ready = by_process(home)
        time.sleep(settle_s)
        before, began = by_process(home), time.monotonic()
        time.sleep(idle_s)
        after, took_s = by_process(home), time.monotonic() - began
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
    memory = {name: sum(one.memory_bytes for one in group) / 1e6 for name, group in after.items()}
    idle = {name: (_cpu_s(after[name]) - _cpu_s(before.get(name, []))) / took_s for name in after}
    return {
        "ready_s": round(ready_s, 2),
        "cpu_until_ready_s": {name: round(_cpu_s(group), 2) for name, group in at_ready.items()},
        "memory_mb": {name: round(size, 1) for name, size in memory.items()},
        "memory_without_workers_mb": round(sum(size for name, size in memory.items() if "worker" not in name), 1),
        "idle_cores": {name: round(share, 4) for name, share in idle.items()},
        "idle_cores_in_all": round(sum(idle.values()), 4),
        "num_processes": sum(map(len, after.values())),
    }


def _cpu_s(group: list[processes.Process]) -> float:
    return sum(one.cpu_s for one in group)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument(
        "--idle-s", type=float, default=30.0, help="Seconds over which the idle processes are watched."
    )
    arguments.add_argument("--settle-s", type=float, default=15.0, help="Seconds between ready and idle.")
    arguments.add_argument("--out", type=Path, help="JSON file to write.")
    asked = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="headgate-start-") as directory:
        home = Path(directory) / "home"
        home.mkdir(mode=0o700)
        found = {name: measured(home, asked.idle_s, asked.settle_s) for name in ("first start", "second start")}
    told = {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "load": os.getloadavg(), **found}
    print(json.dumps(told, indent=2))
    if asked.out is not None:
        asked.out.write_text(json.dumps(told, indent=2) + "\n")
    second = found["second start"]
    for name, value, most in (
        ("memory without the worker (MB)", second["memory_without_workers_mb"], MOST_MB),
        ("idle processor time (cores)", second["idle_cores_in_all"], MOST_CPU),
        ("ready after (s)", second["ready_s"], MOST_READY_S),
    ):
        print(f"{name}: {value}, target {most}: {'met' if value <= most else 'MISSED'}", file=sys.stderr)


if __name__ == "__main__":
    main()
