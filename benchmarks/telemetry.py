"""The cost of telemetry: CPU time for each request, with telemetry and without.

    python benchmarks/telemetry.py                            # SQLite; streamed chats of 128 tokens, bodies of 8
    python benchmarks/telemetry.py --model demo               # the demo model computes in place of a worker that draws letters
    python benchmarks/telemetry.py --database postgresql
    python benchmarks/telemetry.py --part none                # switches nothing: what the measurement itself errs by

One gateway, as `headgate up` starts it, with a worker that draws letters instead of computing, has telemetry switched on
and off in turns of some seconds. On, it traces a tenth of the requests, sends the spans to a receiver in a process
of its own, and writes the request log; off, its observers of ended requests lack these two. Everything else is the same
in both, the access log and the counting of metrics included. So both sides have the same memory, the same cores and the
same neighbours.

At the end of each turn the gateway writes the rows and sends the spans that wait, and then reads the CPU time of its
process (user and system, all threads), so that what telemetry does later counts in the turn that caused it. Turns come
in the order on, off, off, on, so that a drift cancels out. With two cores or more the gateway has a core of its own.

The CPU of a request differs by a sixth from turn to turn on a shared machine, which hides one in a hundred. So the
gateway also reads the clock of its thread around everything that telemetry does: in the loop, in the threads of SQL and
of the exporter. `own` is one plus the share of that in the turns with telemetry. It misses only what telemetry makes
slower in other code. Of the readings of the clock, it leaves out what they take around a call of nothing, and no more.

`ratio` and `own` are of the gateway's process alone. `own_of_all` is of all that a request costs: the CPU of the gateway,
of the poster, of Redis, of jobs and of the worker. A worker gathers each request's events whether they are kept or not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import dataclasses
import datetime
import gzip
import http.server
import json
import math
import multiprocessing
import os
import platform
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
import types
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import mock_server
import uvloop
from memory import cpu_name, cpu_seconds, one, postgresql, processes, serving, tenants

from gateway.cli.model import DEMO_MODEL_ID
from gateway.cli.model_workers import ModelWorkers

RATIO = 0.1
CONCURRENCY = 16
WARM_UP = 256
STEP_S = 0.004
"""The time of a worker's step. A worker without pace would send tokens faster than the gateway takes them."""
BAR = 1.01
MIN_PAIRS = 4
ORDER = ("with", "without", "without", "with")
SETTLE_S = 0.3
"""The wait behind the last answer of a turn: its settlement, after which the request is observed."""
GATEWAY = "gateway"
SWITCH = "TELEMETRY_SWITCH"
"""The variable with the path of the socket at which the gateway takes commands."""
PARTS = {"both": {"spans", "rows"}, "spans": {"spans"}, "rows": {"rows"}, "none": set()}


# --- the gateway ---


class OwnTime:
    """The seconds of CPU that telemetry itself took, in all threads of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_within: contextvars.ContextVar[bool] = contextvars.ContextVar("is_within", default=False)
        self.seconds = 0.0
        self._of_clock = self._clock_s()
        """The seconds that the clock counts around nothing."""

    def counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function, whose CPU counts."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._add(time.thread_time() - began)

        return call

    def counted_steps(self, function: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Awaitable[Any]]:
        """Returns the coroutine function. Each of its steps counts, and what it hands to the threads of SQL."""

        async def call(*args: Any, **kwargs: Any) -> Any:
            self._is_within.set(True)
            try:
                return await self._steps(function(*args, **kwargs))
            finally:
                self._is_within.set(False)

        return call

    def if_within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function as it is run in another thread."""
        return self.counted(function) if self._is_within.get() else function

    @types.coroutine
    def _steps(self, inner: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        given, failure = None, None
        while True:
            began = time.thread_time()
            try:
                waits_for = inner.throw(failure) if failure is not None else inner.send(given)
            except StopIteration as end:
                return end.value
            finally:
                self._add(time.thread_time() - began)
            given, failure = None, None
            try:
                given = yield waits_for
            except BaseException as error:  # noqa: BLE001 - it is handed on to the coroutine
                failure = error

    def _add(self, seconds: float) -> None:
        with self._lock:
            self.seconds += seconds - self._of_clock

    def _clock_s(self) -> float:
        """Returns the least that a counted call of a function that does nothing takes."""
        self._of_clock = 0.0
        nothing, least = self.counted(lambda: None), math.inf
        for _ in range(1000):
            before = self.seconds
            nothing()
            least = min(least, self.seconds - before)
        self.seconds = 0.0
        return least


OWN = OwnTime()


def count_own_time() -> None:
    """Makes everything that telemetry does count. It comes before the application is made."""
    from aiosqlite import core

    from gateway.telemetry.request_log import RequestLogWriter
    from gateway.telemetry.span_export import _Counted
    from gateway.telemetry.tracing import Tracing

    for kind, name in ((RequestLogWriter, "observe"), (Tracing, "observe"), (Tracing, "shipped"), (_Counted, "export")):
        setattr(kind, name, OWN.counted(getattr(kind, name)))
    for name in ("write", "_add"):
        setattr(RequestLogWriter, name, OWN.counted_steps(getattr(RequestLogWriter, name)))
    execute = core.Connection._execute

    async def execute_counted(self: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await execute(self, OWN.if_within(function), *args, **kwargs)

    core.Connection._execute = execute_counted


class UpWithSwitch(mock_server.UpWithMock):
    """Its gateways are this script's."""

    def _gateway(self, slot: int) -> Any:
        return dataclasses.replace(super()._gateway(slot), command=[sys.executable, __file__, GATEWAY])


class DemoWithSwitch(UpWithSwitch):
    """Its workers compute, with the demo model."""

    workers_kind = ModelWorkers

    @staticmethod
    def model(home: Path) -> str:
        return DEMO_MODEL_ID


INSTALLATIONS: dict[str, type[UpWithSwitch]] = {"mock": UpWithSwitch, "demo": DemoWithSwitch}


def serve_gateway() -> int:
    """Runs a gateway with a switch, until a signal."""
    from gateway import __main__, resources  # the measuring process needs no gateway

    count_own_time()
    resources.ALL.insert(resources.ALL.index(resources.request_log) + 1, switch)
    if own := set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0):
        os.sched_setaffinity(0, own)
    return __main__.main()


async def switch(app: Any) -> AsyncIterator[None]:
    """A resource that takes the names of what shall observe requests from now on, one command a line. Before it answers,
    with the seconds of CPU that the process took until then and those of telemetry itself, nothing waits any more."""
    from gateway.telemetry.keys import OBSERVERS, TRACING

    observers, traces = app[OBSERVERS]._all, app[TRACING]
    *always, spans, rows = observers
    (log,) = (cell.cell_contents.__self__ for cell in rows.__closure__)

    async def written() -> None:
        """Waits for the rows, which are written every two seconds."""
        while log._ended or log._waiting:  # noqa: ASYNC110 - nobody tells when they are
            await asyncio.sleep(0.05)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            await written()
            await asyncio.to_thread(traces._out._queue.force_flush)
            spent, own = time.process_time(), OWN.seconds
            names = line.decode().split()
            observers[:] = [*always, *([spans] if "spans" in names else []), *([rows] if "rows" in names else [])]
            writer.write(f"{spent} {own}\n".encode())

    server = await asyncio.start_unix_server(serve, os.environ[SWITCH])
    yield
    server.close()


def collect(sock: socket.socket, num_spans: Any) -> None:
    """Receives spans as an OpenTelemetry collector does, and counts them."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            found = ExportTraceServiceRequest.FromString(body)
            with num_spans.get_lock():
                num_spans.value += sum(len(s.spans) for r in found.resource_spans for s in r.scope_spans)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(sock.getsockname(), Handler, bind_and_activate=False)
    server.socket = sock
    server.serve_forever()


@contextlib.contextmanager
def collector() -> Iterator[tuple[str, Any]]:
    """The endpoint of a receiver, and the number of spans it got."""
    context = multiprocessing.get_context("fork")
    num_spans = context.Value("q", 0)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as sock:
        process = context.Process(target=collect, args=(sock, num_spans), daemon=True)
        process.start()
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", num_spans
        process.kill()


# --- a round ---


class Spent(NamedTuple):
    """Seconds of CPU: of the gateway's process, of telemetry in it, and of all other processes."""

    process: float
    own: float
    others: float


class Load(NamedTuple):
    """Chats that are answered as streams or as bodies of so many tokens."""

    form: str
    tokens: int

    @classmethod
    def parse(cls, text: str) -> Load:
        form, _, tokens = text.partition(":")
        if form not in ("stream", "body"):
            raise ValueError
        return cls(form, int(tokens))


def request(ready: dict[str, Any], key: str, load: Load) -> bytes:
    """A chat; each prompt is new."""
    body = json.dumps(
        {
            "model": ready["model"],
            "messages": [{"role": "user", "content": f"{uuid.uuid4()} " + "What is a lease? " * 10}],
            "max_tokens": load.tokens,
            "stream": load.form == "stream",
            "ignore_eos": True,
        }
    )
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {urlsplit(ready['base_url']).netloc}\r\n"
        f"authorization: Bearer {key}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def send(ready: dict[str, Any], keys: list[str], load: Load, seconds: float, least: int = 0) -> int:
    """Sends requests for so long, and at least so many. Returns their number."""
    sent, until = 0, time.monotonic() + seconds
    address = urlsplit(ready["base_url"])

    async def client() -> None:
        nonlocal sent
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        while time.monotonic() < until or sent < least:
            sent += 1
            if (status := await one(reader, writer, request(ready, keys[sent % len(keys)], load))) != 200:
                raise RuntimeError(f"a request was answered with {status}")
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(client())
    await asyncio.sleep(SETTLE_S)
    return sent


async def measure(ready: dict[str, Any], path: Path, told: argparse.Namespace) -> dict[str, dict[str, Any]]:
    keys = await tenants(ready)
    others = [pid for pid in processes(ready).values() if pid not in ready["pids"]["gateway"]]
    reader, writer = await asyncio.open_unix_connection(path)

    async def turn_to(parts: set[str]) -> Spent:
        """Switches, and returns the seconds of CPU at the end of the turn before."""
        writer.write(f"{' '.join(parts)}\n".encode())
        process, own = map(float, (await reader.readline()).split())
        return Spent(process, own, sum(map(cpu_seconds, others)))

    found = {}
    for load in told.load:
        await turn_to(PARTS[told.part])
        await send(ready, keys, load, 0, WARM_UP)
        turns: dict[str, list[float]] = {"with": [], "without": [], "own": [], "others": []}
        until = time.monotonic() + told.seconds
        while time.monotonic() < until or len(turns["with"]) < MIN_PAIRS:
            for name in ORDER:
                before = await turn_to(PARTS[told.part] if name == "with" else set())
                count = await send(ready, keys, load, told.turn_s)
                after = await turn_to(set())
                turns[name].append(round((after.process - before.process) / count * 1e6, 1))
                if name == "with":
                    turns["own"].append(round((after.own - before.own) / count * 1e6, 1))
                    turns["others"].append(round((after.others - before.others) / count * 1e6, 1))
        found[f"{load.form} of {load.tokens} tokens"] = summary(turns)
    writer.close()
    return found


def summary(found: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the ratio of the sums, and the bounds between which it lies in 95 of 100 runs as far as the turns show;
    and what telemetry itself took, as a ratio of the same kind."""
    pairs = list(zip(found["with"], found["without"], strict=True))
    gateway, own = sum(found["with"]), sum(found["own"])
    everything = gateway + sum(found["others"])
    ratio = sum(a for a, _ in pairs) / sum(b for _, b in pairs)
    source = random.Random(0)
    drawn = [source.choices(pairs, k=len(pairs)) for _ in range(2000)]
    ratios = sorted(sum(a for a, _ in one) / sum(b for _, b in one) for one in drawn)
    return {
        "ratio": round(ratio, 4),
        "bounds": [round(ratios[50], 4), round(ratios[-50], 4)],
        "own": round(gateway / (gateway - own), 4),
        "own_of_all": round(everything / (everything - own), 4),
        "bar": BAR,
        "is_met": everything / (everything - own) <= BAR and ratios[50] <= BAR,
        "us_per_request": {name: round(statistics.mean(times), 1) for name, times in found.items()},
        "num_pairs": len(pairs),
        "us_by_turn": found,
    }


def run(told: argparse.Namespace) -> None:
    with contextlib.ExitStack() as stack:
        endpoint, num_spans = stack.enter_context(collector())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headgate-telemetry-")))
        env = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "HEADGATE_TRACE_RATIO": str(RATIO),
            mock_server.STEP_S: str(STEP_S),
            SWITCH: str(folder / "switch"),
        }
        if told.database == "postgresql":
            env["HEADGATE_DATABASE_URL"] = stack.enter_context(postgresql())
        ready = stack.enter_context(serving(folder / "home", env, [__file__, told.model]))
        loads = uvloop.run(measure(ready, folder / "switch", told))
        report({"num_spans": num_spans.value, "loads": loads}, told)


def report(figures: dict[str, Any], told: argparse.Namespace) -> None:
    for load, found in figures["loads"].items():
        shown = {name: value for name, value in found.items() if name != "us_by_turn"}
        print(f"{load}: {json.dumps(shown)}", flush=True)
    if told.output is None:
        return
    known = json.loads(told.output.read_text()) if told.output.exists() else {}
    machine = {"cores": os.cpu_count(), "cpu": cpu_name(), "python": platform.python_version()}
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    parts = {"both": "spans and rows", "none": "nothing switched"}.get(told.part, told.part)
    known[f"{told.database}, {told.model}, {parts}"] = {"date": date, "machine": machine, **figures}
    told.output.write_text(json.dumps(known, indent=1) + "\n")


def main() -> int:
    if sys.argv[1:2] == [GATEWAY]:
        return serve_gateway()
    if len(sys.argv) > 1 and sys.argv[1] in INSTALLATIONS:
        mock_server.serve(INSTALLATIONS[sys.argv[1]], sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--model", choices=INSTALLATIONS, default="mock", help="mock: the worker draws letters")
    parser.add_argument("--part", choices=PARTS, default="both", help="what is switched: spans, rows of the log")
    parser.add_argument(
        "--load",
        type=Load.parse,
        nargs="*",
        default=[Load("stream", 128), Load("body", 8)],
        help="stream:<tokens> or body:<tokens>",
    )
    parser.add_argument(
        "--seconds", type=float, default=80, help="of a load's turns together; there are eight at least"
    )
    parser.add_argument(
        "--turn-s", type=float, default=6.0, help="each ends with a transaction and a body of spans more"
    )
    parser.add_argument("--output", type=Path, help="JSON; other figures stay in it")
    told = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[:1]))  # and so is all that is started from here, but for the gateways
    run(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
