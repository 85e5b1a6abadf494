"""The memory that a request leaves behind: 100,000 of them through `headgate up` with a worker that computes nothing.

    python benchmarks/memory.py                                    # SQLite, as `headgate up` starts it
    python benchmarks/memory.py --database postgresql              # a database of its own on the local server

After a warm-up every process' memory is read, at rest, and again after each of several equal parts of the run: what
grows with requests is a slope over all parts, what fills up once is not. Redis keeps ended requests for 300 s, so its
first and last readings wait until it has let go of them and has given their memory back; those in between do not. The
clients send whole and streamed completions of four tenants with limits. Private bytes: what would be free if the
process ended.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import mock_server
import psycopg
import redis.asyncio
import uvloop
from fairness_http import new_tenant

START_S = 120
REST_S = 5.0
"""The wait for what is still under way after the last answer: postings, the workers' own records."""
TOMBSTONES_S = 400
FEW_KEYS = 200
GIVEN_BACK_S = 60
"""Redis makes its tables smaller and gives memory back step by step, for some 30 s after 100,000 keys have expired."""
LIMITS = {"max_requests_per_1_minute": 10**8, "max_tokens_per_1_minute": 10**10}


@contextlib.contextmanager
def serving(
    home: Path, env: dict[str, str], script: Sequence[str] = (mock_server.__file__,)
) -> Iterator[dict[str, Any]]:
    """The ready file's content and the supervisor's pid; stopped by it."""
    ready_file = home.parent / "ready.json"
    command = [sys.executable, *script, "--home", str(home), "--ready-file", str(ready_file)]
    with (home.parent / "up.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + START_S
        while not ready_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((home.parent / "up.log").read_text()[-2000:])
            time.sleep(0.1)
        yield {**json.loads(ready_file.read_text()), "supervisor": process.pid}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


@contextlib.contextmanager
def postgresql() -> Iterator[str]:
    """A database on the local server, dropped afterwards."""
    name = f"hg_bench_{uuid.uuid4().hex[:12]}"
    server = f"{os.environ.get('PGUSER', 'postgres')}@127.0.0.1:5432"
    with psycopg.connect(f"postgresql://{server}/postgres", autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    try:
        yield f"postgresql+psycopg://{server}/{name}"
    finally:
        with psycopg.connect(f"postgresql://{server}/postgres", autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


# --- what is sent ---


async def tenants(ready: dict[str, Any]) -> list[str]:
    """Keys of four, each with limits of this model that none of them reaches."""
    keys = [ready["api_key"], *[await new_tenant(ready, f"tenant {n}") for n in range(3)]]
    headers = {"Authorization": f"Bearer {ready['admin_key']}"}
    projects = "/v1/organization/projects"
    async with aiohttp.ClientSession(ready["base_url"], headers=headers, raise_for_status=True) as admin:
        async with admin.get(projects, params={"limit": 100}) as answer:
            found = (await answer.json())["data"]
        for project in found:
            path = f"{projects}/{project['id']}/rate_limits/rl-{ready['model']}"
            await (await admin.post(path, json=LIMITS)).read()
    return keys


def request(ready: dict[str, Any], key: str, number: int) -> bytes:
    """Two of three whole, one streamed; each prompt is new."""
    body = json.dumps(
        {
            "model": mock_server.MODEL,
            "prompt": f"{number} letters, {uuid.uuid4()}",
            "max_tokens": 1 + number % 8,
            "stream": number % 3 == 0,
        }
    )
    address = urlsplit(ready["base_url"])
    return (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address.netloc}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()


async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, content: bytes) -> int:
    """The status; the whole answer has been read. Knows HTTP as far as to see where an answer ends."""
    writer.write(content)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    _, is_told, length = head.partition(b"content-length: ")
    if is_told:
        await reader.readexactly(int(length.partition(b"\r")[0]))
    else:
        await reader.readuntil(b"0\r\n\r\n")
    return int(head.split(b" ", 2)[1])


async def send(ready: dict[str, Any], keys: list[str], count: int, concurrency: int) -> float:
    """Requests per second. Refusals of a busy limiter are sent again, anything else is an error."""
    left = iter(range(count))
    address = urlsplit(ready["base_url"])

    async def client() -> None:
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=2**22)
        for number in left:
            content = request(ready, keys[number % len(keys)], number)
            for _ in range(20):
                status = await one(reader, writer, content)
                if status != 503:
                    break
                await asyncio.sleep(0.5)
            if status != 200:
                raise RuntimeError(f"a request was answered with {status}")
        writer.close()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return count / (time.perf_counter() - began)


# --- what is read ---


def processes(ready: dict[str, Any]) -> dict[str, int]:
    """Returns the pid by name, of the supervisor and everything below it."""
    found = {"supervisor": ready["supervisor"]}
    for kind in ("gateway", "worker", "jobs"):
        for pid in ready["pids"][kind]:
            found[kind] = pid
            for number, child in enumerate(children(pid)):
                is_poster = b"poster_process" in Path(f"/proc/{child}/cmdline").read_bytes()
                found["poster" if is_poster else f"{kind}, child {number}"] = child
    return {**found, "redis": ready["pids"]["redis"]}


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for task in tasks for child in task.read_text().split())


def memory(pid: int) -> dict[str, int]:
    """RSS, PSS and private bytes, and how many threads there are."""
    found = {"rss": 0, "pss": 0, "private": 0}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, kilobytes = line.split(":")
        key = "private" if name.startswith("Private_") else name.lower()
        if key in found:
            found[key] += 1024 * int(kilobytes.split()[0])
    return {**found, "threads": len(list(Path(f"/proc/{pid}/task").iterdir()))}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def limiter(home: Path) -> AsyncIterator[redis.asyncio.Redis]:
    client = redis.asyncio.Redis.from_url(f"unix://{home / 'run' / 'redis.sock'}?db=0")
    try:
        yield client
    finally:
        await client.aclose()


async def at_rest(ready: dict[str, Any], home: Path, *, until_few_keys: bool) -> dict[str, Any]:
    """Every process' memory once nothing is under way, the share of a core that each takes then, and the seconds of CPU
    that each has taken until now. `until_few_keys`: once Redis has let go of ended requests."""
    pids = processes(ready)
    spent = {name: cpu_seconds(pid) for name, pid in pids.items()}
    await asyncio.sleep(REST_S)
    before, began = {name: cpu_seconds(pid) for name, pid in pids.items()}, time.monotonic()
    await asyncio.sleep(REST_S)
    passed = time.monotonic() - began
    idle = {n: round((cpu_seconds(pid) - before[n]) / passed, 3) for n, pid in pids.items()}
    async with limiter(home) as client:
        num_keys, deadline = await client.dbsize(), time.monotonic() + TOMBSTONES_S
        while until_few_keys and time.monotonic() < deadline:
            if await client.dbsize() <= FEW_KEYS:
                await asyncio.sleep(GIVEN_BACK_S)
                break
            await asyncio.sleep(1)
        num_left = await client.dbsize()
    found = {name: memory(pid) for name, pid in pids.items()}
    return {
        "processes": found,
        "cpu_s": spent,
        "cpu_share_at_rest": idle,
        "redis_keys": num_keys,
        "redis_keys_left": num_left,
    }


def slopes(readings: list[dict[str, Any]], part: int) -> dict[str, dict[str, float]]:
    """Bytes a request, of each process: over all parts, and the median of the parts."""
    found = {}
    for name in readings[0]["processes"]:
        sizes = [reading["processes"][name]["private"] for reading in readings]
        each = [(b - a) / part for a, b in itertools.pairwise(sizes)]
        found[name] = {
            "private_before": sizes[0],
            "private_after": sizes[-1],
            "bytes_per_request": round((sizes[-1] - sizes[0]) / (part * len(each)), 1),
            "by_part": [round(one, 1) for one in each],
            "median_of_parts": round(statistics.median(each), 1),
        }
    return found


async def measure(ready: dict[str, Any], home: Path, told: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    """Yields the figures until now, after each part: what a long run has seen is kept when it is stopped."""
    keys = await tenants(ready)
    rates = [await send(ready, keys, told.warm_up, told.concurrency)]
    readings = [await at_rest(ready, home, until_few_keys=not told.hurry)]
    part = told.requests // told.parts
    for number in range(told.parts):
        rates.append(await send(ready, keys, part, told.concurrency))
        is_last = number == told.parts - 1
        readings.append(await at_rest(ready, home, until_few_keys=is_last and not told.hurry))
        yield {
            "requests_per_part": part,
            "requests_per_s": [round(rate, 1) for rate in rates],
            "slopes": slopes(readings, part),
            "readings": readings,
        }


async def run(ready: dict[str, Any], home: Path, told: argparse.Namespace) -> None:
    async for figures in measure(ready, home, told):
        print(table(figures), file=sys.stderr, flush=True)
        if told.output is not None:
            keep(figures, told)
    print(table(figures))


def keep(figures: dict[str, Any], told: argparse.Namespace) -> None:
    known = json.loads(told.output.read_text()) if told.output.exists() else {}
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    machine = {"cores": os.cpu_count(), "cpu": cpu_name(), "python": platform.python_version(), "date": date}
    command = " ".join(["benchmarks/memory.py", *sys.argv[1:]])
    known[told.database] = {"command": command, "machine": machine, **figures}
    told.output.write_text(json.dumps(known, indent=2) + "\n")


def table(figures: dict[str, Any]) -> str:
    rows = ["| process | private before, MB | after, MB | bytes a request | by part |", "|---|--:|--:|--:|---|"]
    for name, one in figures["slopes"].items():
        rows.append(
            f"| {name} | {one['private_before'] / 1e6:.1f} | {one['private_after'] / 1e6:.1f} "
            f"| {one['bytes_per_request']} | {one['by_part']} |"
        )
    return "\n".join(rows)


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--warm-up", type=int, default=20_000)
    parser.add_argument("--parts", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--hurry", action="store_true", help="do not wait for Redis; its figures mean nothing")
    parser.add_argument("--output", type=Path, help="JSON; figures of the other database stay in it")
    told = parser.parse_args()
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "home"
        url = stack.enter_context(postgresql()) if told.database == "postgresql" else None
        ready = stack.enter_context(serving(home, {"HEADGATE_DATABASE_URL": url} if url else {}))
        uvloop.run(run(ready, home, told))


if __name__ == "__main__":
    main()
