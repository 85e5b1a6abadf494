"""How late a loop wakes up: by its turns on a core beside programs that compute, and by the interpreter lock beside a
thread that reads large bodies.

    python benchmarks/turns.py [--rounds 6] [--seconds 1.5] [--burners 2]

Each round tries every variant once, one after the other, so that what else the machine does touches all alike. The gateway
has the short turns of `workers/process/turns.py` and hands over the lock after 0.5 ms (`gateway/__main__.py`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import uvloop  # noqa: E402 - the root is on the path only now

from gateway.base import errors  # noqa: E402 - as above
from gateway.intake.json_body import decode_object  # noqa: E402 - as above
from workers.process import turns  # noqa: E402 - as above

FORK = multiprocessing.get_context("fork")
MIB = 2**20
BURST_S = 0.0008
"""The processor time of a request's events in the gateway."""
SLEEP_S = 0.002
INTERVALS_S = (0.005, 0.001, 0.0005, 0.0002)
BODIES = {
    "4 MiB of broken JSON": b'{"a": ["' + b'x\\"' * (4 * MIB // 3 - 9),
    "390,000 token ids": json.dumps({"prompt": [255] * 390_000}).encode(),
}
PAUSE_SHARE = 0.5
"""The share of its time in which the reading thread rests."""


def burn() -> None:
    while True:
        pass


def wake_ups(asks: bool, seconds: float, answers: Any) -> None:
    """Sleeps, sees how late it wakes up, and works for a burst."""
    if asks and not turns.shorten():
        raise SystemExit("This system gives no short turns.")
    late = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        before = time.perf_counter()
        time.sleep(SLEEP_S)
        late.append(time.perf_counter() - before - SLEEP_S)
        used = time.thread_time()
        while time.thread_time() - used < BURST_S:
            pass
    answers.put(late)


def asks(path: str, seconds: float, answers: Any) -> None:
    """Asks the loop for an echo again and again, and times it."""
    times = []
    end = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        while time.monotonic() < end:
            before = time.perf_counter()
            connection.sendall(b"x")
            connection.recv(1)
            times.append(time.perf_counter() - before)
            time.sleep(0.001)
    answers.put(times)


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


def answer_of(function: Callable[..., None], *arguments: object) -> list[float]:
    answers = FORK.Queue()
    process = FORK.Process(target=function, args=(*arguments, answers), daemon=True)
    process.start()
    found: list[float] = answers.get(timeout=60)
    process.join()
    return found


@contextlib.contextmanager
def burning(number: int) -> Iterator[None]:
    processes = [FORK.Process(target=burn, daemon=True) for _ in range(number)]
    try:
        for process in processes:
            process.start()
        yield
    finally:
        for process in processes:
            process.kill()
            process.join()


def by_turns(rounds: int, seconds: float, burners: int) -> None:
    for number in (0, burners):
        found: defaultdict[bool, list[float]] = defaultdict(list)
        with burning(number):
            for _, asked in itertools.product(range(rounds), (False, True)):
                found[asked] += answer_of(wake_ups, asked, seconds)
        for asked, late in found.items():
            show(f"beside {number} programs that compute, {'short' if asked else 'ordinary'} turns", late)


async def by_lock(rounds: int, seconds: float) -> None:
    found: defaultdict[tuple[str, float], list[float]] = defaultdict(list)
    reading: list[bytes] = []
    threading.Thread(target=read, args=(reading,), daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/echo"
        server = await asyncio.get_running_loop().create_unix_server(Echo, path)
        for _, name, interval_s in itertools.product(range(rounds), BODIES, INTERVALS_S):
            sys.setswitchinterval(interval_s)
            reading[:] = [BODIES[name]]
            found[name, interval_s] += await asyncio.to_thread(answer_of, asks, path, seconds)
            reading.clear()
        server.close()
    for (name, interval_s), times in found.items():
        show(f"beside {name}, lock handed over after {interval_s * 1e3:g} ms", times)


def read(reading: list[bytes]) -> None:
    """Decodes the body that is there, as a text thread of the gateway does, and rests as long as that takes."""
    while True:
        before = time.perf_counter()
        with contextlib.suppress(errors.ApiError, IndexError):
            decode_object(reading[0])
        time.sleep(max(0.001, (time.perf_counter() - before) * PAUSE_SHARE / (1 - PAUSE_SHARE)))


def show(what: str, seconds: list[float]) -> None:
    seconds.sort()
    parts = [f"p{share * 100:g} {1e3 * seconds[int(len(seconds) * share)]:.2f}" for share in (0.5, 0.9, 0.95, 0.99)]
    print(f"{what:66} {len(seconds):6}  {'  '.join(parts)} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--burners", type=int, default=2)
    told = parser.parse_args()
    by_turns(told.rounds, told.seconds, told.burners)
    uvloop.run(by_lock(told.rounds, told.seconds))


if __name__ == "__main__":
    main()
