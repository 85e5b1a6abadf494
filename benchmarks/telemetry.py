"""The cost of telemetry for a gateway: CPU time of its process for each request, with telemetry and without.

    python benchmarks/telemetry.py                            # SQLite; streamed chats of 128 tokens, bodies of 8
    python benchmarks/telemetry.py --database postgresql
    python benchmarks/telemetry.py --part none                # both sides alike: what the measurement itself errs by

Two installations run side by side, as `headgate up` starts them, with a worker that draws letters instead of computing.
One gateway has telemetry: it traces a tenth of the requests, sends the spans to a receiver in a process of its own, and
writes the request log. The other one exports no spans and has no request log; everything else is the same, the access
log and the counting of metrics included.

Rounds of about a second alternate, so that what else the machine does meets both sides alike. Of each side the CPU time
of its own process is read from the beginning of its round to the beginning of its next one, so that what telemetry does
later counts as well. What the gateway without telemetry takes at rest is taken off both. Counted is user and system
time of the gateway and, beside PostgreSQL, of the process that posts for it. With two cores or more the gateways have a
core of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import gzip
import http.server
import itertools
import json
import multiprocessing
import os
import platform
import random
import socket
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import mock_server
import uvloop
from memory import children, cpu_name, one, postgresql, serving, tenants

RATIO = 0.1
REST_S = 6.0
"""The wait behind the last round. Rows are written each second, spans after 5 s at the latest."""
CONCURRENCY = 16
ROUND = 16
"""Requests of a round."""
WARM_UP = 128
STEP_S = 0.004
"""The time of a worker's step. A worker without pace would send tokens faster than the gateway takes them."""
BAR = 1.01
MIN_ROUNDS = 5
PROCESS_CLOCK = 2
"""The clock of a process, as `clock_getcpuclockid` names it by the process id: user and system time in nanoseconds."""
GATEWAY = "gateway"
PARTS = {"both": {"spans", "rows"}, "spans": {"spans"}, "rows": {"rows"}, "none": set()}


# --- the two installations ---


class UpWithRows(mock_server.UpWithMock):
    rows = "rows"

    def _gateway(self, slot: int) -> Any:
        return dataclasses.replace(super()._gateway(slot), command=[sys.executable, __file__, GATEWAY, self.rows])


class UpWithoutRows(UpWithRows):
    rows = "no rows"


def serve_gateway(rows: str) -> int:
    """Runs a gateway, with or without the request log, until a signal."""
    from gateway import __main__, resources  # the measuring process needs no gateway

    if rows == UpWithoutRows.rows:
        resources.ALL.remove(resources.request_log)
    if own := set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0):
        os.sched_setaffinity(0, own)
    return __main__.main()


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
            "model": mock_server.MODEL,
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


async def send(ready: dict[str, Any], keys: list[str], load: Load, count: int) -> None:
    left = iter(range(count))
    address = urlsplit(ready["base_url"])

    async def client() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        for number in left:
            if (status := await one(reader, writer, request(ready, keys[number % len(keys)], load))) != 200:
                raise RuntimeError(f"a request was answered with {status}")
        writer.close()

    async with asyncio.TaskGroup() as group:
        for _ in range(CONCURRENCY):
            group.create_task(client())


def cpu(ready: dict[str, Any]) -> float:
    """Seconds of the gateway and of its poster, from the clocks that Linux has for each process."""
    (gateway,) = ready["pids"]["gateway"]
    return sum(time.clock_gettime(~pid << 3 | PROCESS_CLOCK) for pid in (gateway, *children(gateway)))


async def measure(sides: dict[str, dict[str, Any]], told: argparse.Namespace) -> dict[str, dict[str, Any]]:
    keys = {name: await tenants(ready) for name, ready in sides.items()}
    found = {}
    for load in told.load:
        for name, ready in sides.items():
            await send(ready, keys[name], load, WARM_UP)
        await asyncio.sleep(REST_S)
        found[f"{load.form} of {load.tokens} tokens"] = summary(await rounds(sides, keys, load, told.seconds))
    return found


async def rounds(
    sides: dict[str, dict[str, Any]], keys: dict[str, list[str]], load: Load, seconds: float
) -> dict[str, list[float]]:
    """CPU microseconds of each request, by side and round."""
    began, before = time.monotonic(), cpu(sides["without"])
    await asyncio.sleep(REST_S)
    at_rest = (cpu(sides["without"]) - before) / (time.monotonic() - began)

    def reading(name: str) -> float:
        return cpu(sides[name]) - at_rest * time.monotonic()

    read: dict[str, list[float]] = {name: [] for name in sides}
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(read["with"]) < MIN_ROUNDS:
        for name in sides:
            read[name].append(reading(name))
            await send(sides[name], keys[name], load, ROUND)
    await asyncio.sleep(REST_S)
    for name in sides:
        read[name].append(reading(name))
    return {n: [round((b - a) / ROUND * 1e6, 1) for a, b in itertools.pairwise(r)] for n, r in read.items()}


def summary(found: dict[str, list[float]]) -> dict[str, Any]:
    """The ratio of the sums, and the bounds between which it lies in 95 of 100 runs as far as the rounds show."""
    pairs = list(zip(found["with"], found["without"], strict=True))
    ratio = sum(a for a, _ in pairs) / sum(b for _, b in pairs)
    source = random.Random(0)
    drawn = [source.choices(pairs, k=len(pairs)) for _ in range(2000)]
    ratios = sorted(sum(a for a, _ in one) / sum(b for _, b in one) for one in drawn)
    return {
        "ratio": round(ratio, 4),
        "bounds": [round(ratios[50], 4), round(ratios[-50], 4)],
        "bar": BAR,
        "is_met": ratio <= BAR,
        "us_per_request": {name: round(statistics.mean(times), 1) for name, times in found.items()},
        "num_rounds": len(pairs),
        "us_by_round": found,
    }


def run(told: argparse.Namespace) -> None:
    with contextlib.ExitStack() as stack:
        endpoint, num_spans = stack.enter_context(collector())
        traced = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "HEADGATE_TRACE_RATIO": str(RATIO)}
        untraced = {"OTEL_SDK_DISABLED": "true", "HEADGATE_TRACE_RATIO": "0"}
        sides = {}
        for name, parts in (("with", PARTS[told.part]), ("without", PARTS["none"])):
            env = {mock_server.STEP_S: str(STEP_S), **(traced if "spans" in parts else untraced)}
            up = UpWithRows.rows if "rows" in parts else UpWithoutRows.rows
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headgate-telemetry-")))
            if told.database == "postgresql":
                env = {**env, "HEADGATE_DATABASE_URL": stack.enter_context(postgresql())}
            sides[name] = stack.enter_context(serving(folder / "home", env, [__file__, up]))
        loads = uvloop.run(measure(sides, told))
        report({"num_spans": num_spans.value, "loads": loads}, told)


def report(figures: dict[str, Any], told: argparse.Namespace) -> None:
    for load, found in figures["loads"].items():
        shown = {name: value for name, value in found.items() if name != "us_by_round"}
        print(f"{load}: {json.dumps(shown)}", flush=True)
    if told.output is None:
        return
    known = json.loads(told.output.read_text()) if told.output.exists() else {}
    machine = {"cores": os.cpu_count(), "cpu": cpu_name(), "python": platform.python_version()}
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    parts = {"both": "spans and rows", "none": "both sides alike"}.get(told.part, told.part)
    known[f"{told.database}, {parts}"] = {"date": date, "machine": machine, **figures}
    told.output.write_text(json.dumps(known, indent=1) + "\n")


def main() -> int:
    if sys.argv[1:2] == [GATEWAY]:
        return serve_gateway(sys.argv[2])
    for kind in (UpWithRows, UpWithoutRows):
        if sys.argv[1:2] == [kind.rows]:
            mock_server.serve(kind, sys.argv[2:])
            return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--part", choices=PARTS, default="both", help="what the one side has: spans, rows of the log")
    parser.add_argument(
        "--load",
        type=Load.parse,
        nargs="*",
        default=[Load("stream", 128), Load("body", 8)],
        help="stream:<tokens> or body:<tokens>",
    )
    parser.add_argument(
        "--seconds", type=float, default=40, help="of a load's rounds together; there are five at least"
    )
    parser.add_argument("--output", type=Path, help="JSON; other figures stay in it")
    told = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[:1]))  # and so is all that is started from here, but for the gateways
    run(told)
    return 0


if __name__ == "__main__":
    sys.exit(main())
