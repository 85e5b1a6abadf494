"""This measures what metering costs: endings posted per second, latency of a SETTLE, ship lag, a database outage
drained, admission, the limiter rebuilt; beside it the same work as one SQL transaction per request.

Real journal, shipper, admission and limiter in one process on the gateway's own loop, uvloop, and the load with them;
PostgreSQL by URL (a database of its own, dropped at the end), a Redis of its own. The outage is real: the database takes
no connections and those it has are ended. Its first part has the given length; the records of a 10-minute outage are then made as fast as the journal takes them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import subprocess
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psycopg
import uvloop
from metering_load import Load, Percentiles, Tenants, percentiles

from accounting.database import migrate
from accounting.database.db import Database
from accounting.requests import request_postings
from accounting.values.types import Posting
from gateway.cli.embedded import find_server, server_command
from gateway.journal.poster_process import PosterProcess
from gateway.metering.metering import Metering, metering

RATE = 500
OUTAGE_RECORDS = 300_000
"""10 minutes at `RATE`."""
TARGETS = {
    "endings_posted_per_s": 5_000,
    "settle_p99_ms": 6,
    "ship_lag_p99_ms": 1_000,
    "drain_s": 120,
    "admission_p50_ms": 1,
    "rebuild_s": 5,
}


class Postgres:
    """A database of its own on a server, which can be taken away and given back."""

    def __init__(self, server_url: str) -> None:
        self._server = server_url.replace("postgresql+psycopg://", "postgresql://")
        self._name = f"hg_bench_{uuid.uuid4().hex[:8]}"
        self.url = server_url.rsplit("/", 1)[0] + f"/{self._name}"

    def __enter__(self) -> Postgres:
        self._run(f'CREATE DATABASE "{self._name}"')
        migrate.upgrade(self.url)
        return self

    def __exit__(self, *_: object) -> None:
        self._run(f'DROP DATABASE "{self._name}" WITH (FORCE)')

    def take_away(self) -> None:
        self._run(f'ALTER DATABASE "{self._name}" WITH ALLOW_CONNECTIONS false')
        self._run(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{self._name}'")

    def give_back(self) -> None:
        self._run(f'ALTER DATABASE "{self._name}" WITH ALLOW_CONNECTIONS true')

    def _run(self, statement: str) -> None:
        with psycopg.connect(self._server, autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[call-overload]  # built from our own name


@contextlib.contextmanager
def own_redis(directory: Path) -> Any:
    path = directory / "redis.sock"
    process = subprocess.Popen(
        server_command(find_server(), directory, path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not path.exists():
        time.sleep(0.02)
    try:
        yield f"unix://{path}?db=0"
    finally:
        process.terminate()
        process.wait(10)


def syncs(directory: Path, count: int = 500) -> Percentiles:
    """fdatasync of a small append, alone: what the disk lets a SETTLE cost at least."""
    path = directory / "sync-probe"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    times = []
    for _ in range(count):
        os.write(descriptor, b"x" * 400)
        began = time.perf_counter()
        os.fdatasync(descriptor)
        times.append(time.perf_counter() - began)
    os.close(descriptor)
    path.unlink()
    return percentiles(times)


async def sustained(metered: Metering, load: Load, seconds: float) -> dict[str, Any]:
    """OPEN and SETTLE as fast as the ledger takes them: the journal is never more than a moment ahead."""
    began, first = time.perf_counter(), metered.shipper.num_posted
    gateway, poster = time.process_time(), poster_s(metered)
    await load.as_fast_as_shipped(metered, seconds)
    took = time.perf_counter() - began
    posted = metered.shipper.num_posted - first
    return {
        "endings_posted_per_s": round(posted / took),
        "num_posted": posted,
        "cpu_of_gateway_s_per_s": round((time.process_time() - gateway) / took, 2),
        "cpu_of_poster_s_per_s": round((poster_s(metered) - poster) / took, 2),
    }


def poster_s(metered: Metering) -> float:
    """CPU seconds of the process that posts; 0: it is this one."""
    poster = metered.poster
    if not isinstance(poster, PosterProcess):
        return 0.0
    fields = Path(f"/proc/{poster.pid}/stat").read_text().rpartition(") ")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


async def steady(metered: Metering, load: Load, seconds: float) -> dict[str, Any]:
    """Measures the latency of a SETTLE and the lag of its posting at `RATE`."""
    with load.arriving(metered, RATE) as arriving:
        await asyncio.sleep(seconds)
    await arriving.done()
    return {"rate_per_s": RATE, "settle_ms": percentiles(arriving.settle_s), "ship_lag_ms": percentiles(arriving.lag_s)}


async def outage(
    postgres: Postgres, metered: Metering, load: Load, outage_s: float, num_records: int
) -> dict[str, Any]:
    """All that was settled meanwhile is posted, at most `num_records` behind, while requests keep arriving."""
    await asyncio.to_thread(postgres.take_away)
    first = metered.journal.durable_seq
    with load.arriving(metered, RATE, with_lag=False) as arriving:
        await asyncio.sleep(outage_s)
        await load.burst(metered, num_records - (metered.journal.durable_seq - first))
        behind = metered.journal.durable_seq - metered.shipper.offset
        posted = metered.shipper.num_posted
        began = time.perf_counter()
        await asyncio.to_thread(postgres.give_back)
        await metered.shipper.caught_up()
        took = time.perf_counter() - began
    await arriving.done()
    return {
        "outage_s": outage_s,
        "records_behind": behind,
        "drain_s": round(took, 1),
        "rate_per_s": RATE,
        "endings_posted_per_s": round((metered.shipper.num_posted - posted) / took),
        "settle_ms": percentiles(arriving.settle_s),
    }


async def one_transaction_each(database: Database, postings: Sequence[Posting], num_clients: int = 8) -> dict[str, Any]:
    """The baseline: each request posts its ending by itself, and its client waits for the COMMIT."""
    times: list[float] = []
    left = list(postings)

    async def client(slot: int) -> None:
        while left:
            posting = left.pop()
            began = time.perf_counter()
            async with database.write() as conn:
                await request_postings.post(conn, slot, 1, [posting])
            times.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(client(1000 + number) for number in range(num_clients)))
    took = time.perf_counter() - began
    return {"endings_posted_per_s": round(len(times) / took), "settle_ms": percentiles(times), "clients": num_clients}


async def rebuilt(metered: Metering, tenants: Tenants, num_tenants: int) -> dict[str, Any]:
    """Redis forgets everything; each tenant's next request waits for its state."""
    principals = await tenants.many(num_tenants)
    await metered.link.command("FLUSHALL")
    began = time.perf_counter()
    waits = await tenants.admit_each(metered, principals)
    return {
        "num_tenants": num_tenants,
        "rebuild_s": round(time.perf_counter() - began, 2),
        "wait_ms": percentiles(waits),
    }


async def measure(arguments: argparse.Namespace, directory: Path, redis: str, postgres: Postgres) -> dict[str, Any]:
    async with using(postgres.url, directory, redis) as (database, metered):
        tenants = await Tenants.make(postgres.url, database, 50)
        load = Load(tenants.principals, arguments.seed)
        parts: dict[str, Callable[[], Awaitable[Any]]] = {
            "admission": lambda: tenants.admissions(metered, arguments.admissions),
            "sustained": lambda: sustained(metered, load, arguments.seconds),
            "steady": lambda: steady(metered, load, arguments.seconds),
            "one_transaction_each": lambda: one_transaction_each(database, load.postings(arguments.baseline)),
            "outage": lambda: outage(postgres, metered, load, arguments.outage_s, arguments.outage_records),
            "rebuild": lambda: rebuilt(metered, tenants, arguments.tenants),
        }
        found: dict[str, Any] = {}
        for name, part in parts.items():
            if arguments.only and name not in arguments.only:
                continue
            found[name] = {"fdatasync_ms": syncs(directory), **await part()}
            print(f"{name}: {json.dumps(found[name])}", flush=True)
        await metered.shipper.caught_up()
        return found


@contextlib.asynccontextmanager
async def using(url: str, directory: Path, redis: str) -> AsyncIterator[tuple[Database, Metering]]:
    database = Database(url)
    try:
        async with metering(database=database, redis_url=redis, slot=0, directory=directory / "journal") as metered:
            yield database, metered
    finally:
        await database.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--database-url",
        default=os.environ.get("HEADGATE_TEST_DATABASE_URL", "postgresql+psycopg://postgres@127.0.0.1:5432/postgres"),
    )
    parser.add_argument("--directory", help="of the journal; default: a temporary one")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each rate")
    parser.add_argument("--outage-s", type=float, default=60.0)
    parser.add_argument("--outage-records", type=int, default=OUTAGE_RECORDS)
    parser.add_argument("--admissions", type=int, default=2_000)
    parser.add_argument("--baseline", type=int, default=2_000, help="endings, one transaction each")
    parser.add_argument("--tenants", type=int, default=10_000, help="of the rebuild")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", help="parts of the measurement")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory) as folder,
        own_redis(Path(folder)) as redis,
        Postgres(arguments.database_url) as postgres,
    ):
        found = uvloop.run(measure(arguments, Path(folder), redis, postgres))
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "load": os.getloadavg()},
        "targets": TARGETS,
        **found,
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
