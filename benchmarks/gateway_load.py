"""The gateway's CPU for each request and each event of a stream, beside a bare proxy and LiteLLM, in one run.

    python benchmarks/gateway_load.py                                        # SQLite, as `headgate up` starts it
    python benchmarks/gateway_load.py --database postgresql --output out.json
    python benchmarks/gateway_load.py --rounds 1 --seconds 2 --keys 1 100 --requests 0    # a short look

Headgate has everything on: keys, limits, a budget, prices, journal, ledger, access log and request log; its worker speaks
the frames and computes nothing (`gateway_peers.py`). The bare proxy hands bodies on between aiohttp and aiohttp. LiteLLM
stands before the same server as the bare proxy, without a database, if `--litellm` or PATH has it. Rounds go through all
of them one after the other, each time in the other order.

What counts is the CPU of a process for each request and the ratio to the bare proxy, since neighbours on the machine change
requests per second and hardly these. `per_core` is what one core of the gateway would answer: 1 / its CPU seconds. The
ratios of the bars are of answers and events per second, in one run on one machine.
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
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gateway_peers
import mock_server
import uvloop
from memory import at_rest, cpu_name, cpu_seconds, memory, one, postgresql, processes, serving

from accounting.access import api_keys
from accounting.database.db import Database
from accounting.limits import budgets
from accounting.limits.budgets import NewBudget
from accounting.tenants import tenants
from accounting.values.tenant_types import ModelLimits
from accounting.values.types import Limits

TOKENS = 8
"""Output tokens of a plain request."""
STREAM_TOKENS = 256
STREAMS = 16
AT_ONCE = 100
"""Tenants of one transaction. The gateway's own writers wait that long."""
LIMITS = Limits(requests_per_minute=10**8, tokens_per_minute=10**10, concurrency=10**5)
TRIES = 20
PAUSE_S = 0.5
NO_KEY = "none"
SYSTEMS = ("headgate", "bare", "litellm")
BARS = {
    "cpu_ms_at_64": 0.5,
    "cpu_ms_at_1": 1.5,
    "requests_per_core": 2000.0,
    "events_per_core": 60_000.0,
    "requests_to_bare_at_64": 0.35,
    "events_to_bare": 0.5,
    "keys_to_one": 1.1,
    "first_request_ms": 3.0,
    "first_token_ms": 3.0,
    "last_token_to_done_ms": 1.0,
    "bytes_per_request": 20.0,
}
AT_MOST = {name for name in BARS if name.endswith(("_ms", "_at_64", "_at_1", "_to_one", "_per_request"))} - {
    "requests_to_bare_at_64"
}


@dataclass(frozen=True)
class Peer:
    """One of the systems, as it runs."""

    name: str
    port: int
    pids: Callable[[], dict[str, int]]
    keys: Sequence[str] = (NO_KEY,)
    model: str = mock_server.MODEL

    @property
    def own(self) -> str:
        """The process whose CPU is the system's own."""
        return "gateway" if self.name == "headgate" else self.name


# --- what is sent ---


def content(peer: Peer, key: str, number: int, *, stream: bool, max_tokens: int) -> bytes:
    text = f"Say some letters, please, for the request with the number {number:09d}."
    body = json.dumps(
        {
            "model": peer.model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "stream": stream,
        }
    )
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{peer.port}\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n{body}"
    ).encode()


class Clients:
    """Connections of one system that are kept, and requests over them."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._numbers = itertools.count()
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def until(self, seconds: float, in_flight: int, **how: Any) -> tuple[int, float]:
        """Sends for so many seconds. Returns the number of answers and the seconds that they took."""
        deadline = time.perf_counter() + seconds
        return await self._send(in_flight, iter(lambda: time.perf_counter() < deadline, False), self._peer.keys, how)

    async def each(self, keys: Sequence[str], in_flight: int, **how: Any) -> tuple[int, float]:
        """Sends one request of each key."""
        return await self._send(in_flight, iter(keys), keys, how)

    async def _send(
        self, in_flight: int, left: Iterator[object], keys: Sequence[str], how: dict[str, Any]
    ) -> tuple[int, float]:
        count = 0

        async def client() -> None:
            nonlocal count
            reader, writer = self._idle.pop() if self._idle else await self._connect()
            for _ in left:
                number = next(self._numbers)
                key = keys[count % len(keys)]
                count += 1
                request = content(self._peer, key, number, **how)
                for _ in range(TRIES):
                    status = await one(reader, writer, request)
                    if status != 503:
                        break
                    await asyncio.sleep(PAUSE_S)  # a tenant's limits were not yet there: the machine is busy
                if status != 200:
                    raise RuntimeError(f"{self._peer.name} answered a request with {status}")
            self._idle.append((reader, writer))

        began = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(client())
        return count, time.perf_counter() - began

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._peer.port, limit=2**22)

    async def latencies(self, count: int) -> dict[str, float]:
        """Medians in ms, one stream at a time: to the first token, and from the last to `[DONE]`."""
        first, last = [], []
        for _ in range(count):
            reader, writer = self._idle.pop() if self._idle else await self._connect()
            began = time.perf_counter()
            writer.write(
                content(self._peer, self._peer.keys[0], next(self._numbers), stream=True, max_tokens=STREAM_TOKENS)
            )
            times = await _event_times(reader)
            self._idle.append((reader, writer))
            first.append(times.first - began)
            last.append(times.done - times.last)
        return {
            "first_token_ms": round(1000 * statistics.median(first), 2),
            "last_token_to_done_ms": round(1000 * statistics.median(last), 2),
        }

    def close(self) -> None:
        for _, writer in self._idle:
            writer.close()


@dataclass
class EventTimes:
    first: float = 0.0
    last: float = 0.0
    done: float = 0.0


async def _event_times(reader: asyncio.StreamReader) -> EventTimes:
    found = EventTimes()
    await reader.readuntil(b"\r\n\r\n")
    while not found.done:
        piece = await reader.readuntil(b"\n\n")
        now = time.perf_counter()
        if b'"content":"' in piece.replace(b'": "', b'":"') and b'"content":""' not in piece:
            found.first = found.first or now
            found.last = now
        elif b"[DONE]" in piece:
            found.done = now
    await reader.readuntil(b"0\r\n\r\n")
    return found


# --- the systems ---


@contextlib.contextmanager
def headgate(
    scratch: Path, database_url: str | None, num_keys: int
) -> Iterator[tuple[Peer, dict[str, Any], list[str]]]:
    home = scratch / "home"
    env = {"HEADGATE_DATABASE_URL": database_url} if database_url else {}
    with serving(home, env, (gateway_peers.__file__,)) as ready:
        url = database_url or f"sqlite+aiosqlite:///{home / 'headgate.db'}"
        keys = uvloop.run(make_keys(url, (home / "secrets" / "pepper").read_bytes(), num_keys))
        port = int(ready["base_url"].rsplit(":", 1)[1].split("/")[0])
        yield Peer("headgate", port, lambda: processes(ready), keys[:1]), ready, keys


async def make_keys(url: str, pepper: bytes, count: int) -> list[str]:
    """Tenants with one key each, whose limits and budget bind nobody."""
    database, made = Database(url), []
    now = int(time.time())
    for start in range(0, count, AT_ONCE):
        async with database.write() as conn:
            for number in range(start, min(start + AT_ONCE, count)):
                tenant = await tenants.create(conn, f"load {number}", now=now)
                of_model = ModelLimits(mock_server.MODEL, LIMITS, None)  # the usual 10,000 a minute are soon over
                await tenants.set_model_limits(conn, tenant.id, of_model, now=now)
                budget = NewBudget(tenant_id=tenant.id, limit_micro_units=10**15, period="month")
                await budgets.create(conn, budget, now=now)
                made.append((await api_keys.create(conn, pepper, tenant_id=tenant.id, now=now, limits=LIMITS)).value)
        await asyncio.sleep(0.01)
    await database.close()
    return made


@contextlib.contextmanager
def bare(role: str, upstream: int = 0) -> Iterator[Peer]:
    env = {**os.environ, gateway_peers.UPSTREAM: f"http://127.0.0.1:{upstream}"}
    command = [sys.executable, gateway_peers.__file__, role]
    with ended(subprocess.Popen(command, env=env, stdout=subprocess.PIPE)) as process:
        assert process.stdout is not None
        yield Peer("bare", int(process.stdout.readline()), lambda: {"bare": process.pid})


@contextlib.contextmanager
def litellm(program: str, scratch: Path, upstream: int) -> Iterator[Peer]:
    port = 4100 + os.getpid() % 1000
    config = scratch / "litellm.json"  # JSON is YAML, too
    params = {"model": "openai/mock", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": NO_KEY}
    config.write_text(json.dumps({"model_list": [{"model_name": "mock", "litellm_params": params}]}))
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    with (scratch / "litellm.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    with ended(process):
        uvloop.run(_listening(port))
        yield Peer("litellm", port, lambda: {"litellm": process.pid}, model="mock")


@contextlib.contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)


async def _listening(port: int, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
            return writer.close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.5)


# --- what is measured ---


@contextlib.contextmanager
def counting(peer: Peer) -> Iterator[Callable[[int, float], dict[str, Any]]]:
    """Yields what makes figures of a number of answers, or events, and the seconds that they took."""
    pids = peer.pids()
    before = {name: cpu_seconds(pid) for name, pid in pids.items()}

    def figures(count: int, seconds: float) -> dict[str, Any]:
        spent = {name: cpu_seconds(pid) - before[name] for name, pid in pids.items()}
        own_s = spent[peer.own] + spent.get("poster", 0.0)
        return {
            "per_s": round(count / seconds, 1),
            "per_core": round(count / own_s, 1) if own_s else None,
            "own_cpu_ms": round(1000 * own_s / count, 4),
            "cpu_ms": {name: round(1000 * one_s / count, 4) for name, one_s in spent.items() if one_s},
        }

    yield figures


async def of_peer(peer: Peer, told: argparse.Namespace) -> dict[str, Any]:
    """One turn of one system."""
    clients = Clients(peer)
    found: dict[str, Any] = {}
    await clients.until(told.seconds / 4, 16, stream=False, max_tokens=TOKENS)
    for in_flight in told.in_flight:
        with counting(peer) as figures:
            count, seconds = await clients.until(told.seconds, in_flight, stream=False, max_tokens=TOKENS)
            found[f"at_{in_flight}"] = figures(count, seconds)
    with counting(peer) as figures:
        count, seconds = await clients.until(told.seconds, STREAMS, stream=True, max_tokens=STREAM_TOKENS)
        found["events"] = figures(count * STREAM_TOKENS, seconds)
    if told.latencies:
        found["latency"] = await clients.latencies(told.latencies)
    clients.close()
    return found


async def warm_keys(peer: Peer, keys: Sequence[str], counts: Sequence[int], seconds: float) -> dict[str, Any]:
    """First requests of keys, and then requests of so many keys in turn. The keys of each count are new ones."""
    found: dict[str, Any] = {}
    clients = Clients(peer)
    how = {"stream": False, "max_tokens": TOKENS}
    with counting(peer) as figures:
        found["first"] = figures(*await clients.each(keys, 64, **how))
    for num_keys in counts:
        used = [keys[number % num_keys] for number in range(max(num_keys, 1000))]
        deadline = time.monotonic() + seconds
        await clients.each(used, 64, **how)
        total, took = 0, 0.0
        with counting(peer) as figures:
            while not total or time.monotonic() < deadline:
                count, part = await clients.each(used, 64, **how)
                total, took = total + count, took + part
            found[f"keys_{num_keys}"] = figures(total, took)
    clients.close()
    return found


async def growth(peer: Peer, ready: dict[str, Any], home: Path, count: int) -> dict[str, Any]:
    """Private memory of every process, at rest, before and after so many requests, and the CPU that each takes at rest
    afterwards."""
    clients = Clients(peer)
    before = {name: memory(pid)["private"] for name, pid in processes(ready).items()}
    await clients.each([peer.keys[0]] * count, 64, stream=False, max_tokens=TOKENS)
    after = await at_rest(ready, home, until_few_keys=False)
    clients.close()
    return {
        name: {
            "before": before[name],
            "after": read["private"],
            "bytes_per_request": round((read["private"] - before[name]) / count, 1),
            "cpu_share_at_rest": after["cpu_share_at_rest"][name],
        }
        for name, read in after["processes"].items()
    }


def medians(rounds: Sequence[Any]) -> Any:
    """Returns one result out of equal ones: the median of each number."""
    first = rounds[0]
    if isinstance(first, dict):
        names = [name for name in first if all(name in one for one in rounds)]
        return {name: medians([one[name] for one in rounds]) for name in names}
    known = [one for one in rounds if one is not None]
    return statistics.median(known) if known else None


def verdicts(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns each bar with what was measured. What was not measured has no verdict."""
    own, proxy = result["median"]["headgate"], result["median"]["bare"]
    found = {
        "cpu_ms_at_64": _of(own, "at_64", "own_cpu_ms"),
        "cpu_ms_at_1": _of(own, "at_1", "own_cpu_ms"),
        "requests_per_core": _of(own, "at_64", "per_core"),
        "events_per_core": _of(own, "events", "per_core"),
        "requests_to_bare_at_64": _ratio(own, proxy, "at_64"),
        "events_to_bare": _ratio(own, proxy, "events"),
        "keys_to_one": _worst_of_keys(result.get("keys", {})),
        "first_request_ms": _of(result.get("keys", {}), "first", "own_cpu_ms"),
        "first_token_ms": _of(own, "latency", "first_token_ms"),
        "last_token_to_done_ms": _of(own, "latency", "last_token_to_done_ms"),
        "bytes_per_request": max(
            (read["bytes_per_request"] for read in result.get("memory", {}).values()), default=None
        ),
    }
    return {
        name: {
            "bar": BARS[name],
            "found": value,
            "is_met": value <= BARS[name] if name in AT_MOST else value >= BARS[name],
        }
        for name, value in found.items()
        if value is not None
    }


def _of(figures: dict[str, Any], *path: str) -> float | None:
    for name in path:
        figures = figures.get(name) or {}
    return figures or None  # type: ignore[return-value]  # the last one is a number


def _ratio(own: dict[str, Any], proxy: dict[str, Any], name: str) -> float | None:
    ours, theirs = _of(own, name, "per_s"), _of(proxy, name, "per_s")
    return round(ours / theirs, 3) if ours and theirs else None


def _worst_of_keys(keys: dict[str, Any]) -> float | None:
    costs = {name: figures["own_cpu_ms"] for name, figures in keys.items() if name.startswith("keys_")}
    if "keys_1" not in costs or len(costs) < 2:
        return None
    return round(max(cost for name, cost in costs.items() if name != "keys_1") / costs["keys_1"], 3)


def measure(told: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(postgresql()) if told.database == "postgresql" else None
        ours, ready, keys = stack.enter_context(headgate(scratch, url, max(1, *told.keys)))
        behind = stack.enter_context(bare(gateway_peers.SERVER)).port
        peers = [ours, stack.enter_context(bare(gateway_peers.PROXY, behind))]
        if told.litellm:
            peers.append(stack.enter_context(litellm(told.litellm, scratch, behind)))
        rounds: dict[str, list[Any]] = {peer.name: [] for peer in peers}
        for number in range(told.rounds):
            for peer in peers if number % 2 == 0 else reversed(peers):
                rounds[peer.name].append(uvloop.run(of_peer(peer, told)))
                print(peer.name, json.dumps(rounds[peer.name][-1]), file=sys.stderr, flush=True)
        result = {"rounds": rounds, "median": {name: medians(found) for name, found in rounds.items()}}
        if len(keys) > 1:
            result["keys"] = uvloop.run(warm_keys(ours, keys, told.keys, told.seconds))
        if told.requests:
            result["memory"] = uvloop.run(growth(ours, ready, scratch / "home", told.requests))
    return result | {"bars": verdicts(result)}


def table(result: dict[str, Any]) -> str:
    names = list(result["median"])
    rows = [f"| | {' | '.join(names)} |", f"|---|{'--:|' * len(names)}"]
    for place in result["median"]["headgate"]:
        for what in ("per_s", "per_core", "own_cpu_ms", "first_token_ms", "last_token_to_done_ms"):
            if what in result["median"]["headgate"][place]:
                cells = (str(result["median"][name][place][what]) for name in names)
                rows.append(f"| {place}, {what} | {' | '.join(cells)} |")
    rows += [f"| {name}, own_cpu_ms | {one['own_cpu_ms']} |" for name, one in result.get("keys", {}).items()]
    rows += [
        f"| {name}: bar {one['bar']}, {'met' if one['is_met'] else 'missed'} | {one['found']} |"
        for name, one in result["bars"].items()
    ]
    return "\n".join(rows)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    made.add_argument("--in-flight", type=int, nargs="*", default=[1, 16, 64, 256])
    made.add_argument("--keys", type=int, nargs="*", default=[1, 1_000, 10_000], help="warm keys; 0 measures none")
    made.add_argument("--requests", type=int, default=100_000, help="for the memory that grows; 0 measures none")
    made.add_argument("--latencies", type=int, default=50, help="streams one after the other; 0 measures none")
    made.add_argument("--litellm", default=shutil.which("litellm"), help="LiteLLM's program")
    made.add_argument("--output", type=Path, help="JSON; figures of the other database stay in it")
    return made


def main() -> None:
    told = parser().parse_args()
    result = measure(told)
    print(table(result))
    if told.output is not None:
        known = json.loads(told.output.read_text()) if told.output.exists() else {}
        date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
        machine = {"cores": os.cpu_count(), "cpu": cpu_name(), "python": platform.python_version(), "date": date}
        command = " ".join(["benchmarks/gateway_load.py", *sys.argv[1:]])
        known[told.database] = {"command": command, "machine": machine, **result}
        told.output.write_text(json.dumps(known, indent=2) + "\n")


if __name__ == "__main__":
    main()
