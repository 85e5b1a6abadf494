"""The CPU of a transaction that posts endings to SQLite, and of one with engine records: all threads of this process.

    python benchmarks/sqlite_postings.py [--rounds 15] [--sizes 1 40]

Each transaction is one as the gateway's poster has it. The least of all rounds is what a quiet machine would show.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import uvloop
from money import posting, record

from accounting.database import migrate
from accounting.database.db import Database
from accounting.requests import request_postings
from accounting.tenants import tenants


async def measure(url: str, rounds: int, sizes: list[int]) -> dict[str, list[float]]:
    database, numbers, offsets = Database(url), itertools.count(), itertools.count(1)
    async with database.write() as conn:
        tenant = await tenants.create(conn, "postings", now=1)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        for size in sizes:
            names = [f"req_{next(numbers):032x}" for _ in range(size)]
            began = time.process_time()
            async with database.write() as conn:
                await request_postings.journal_offset(conn, 0)
                endings = [posting(name, tenant_id=tenant.id) for name in names]
                await request_postings.post(conn, 0, next(offsets), endings)
            posted = time.process_time()
            async with database.write() as conn:
                records = [record(name, tenant_id=tenant.id, seq=next(offsets)) for name in names]
                await request_postings.post_engine_records(conn, records)
            ended = time.process_time()
            for kind, seconds in (("endings", posted - began), ("engine records", ended - posted)):
                found.setdefault(f"{size} {kind}", []).append(seconds)
            await asyncio.sleep(0)
    await database.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 40])
    told = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headgate-postings-") as directory:
        url = f"sqlite+aiosqlite:///{Path(directory) / 'headgate.db'}"
        migrate.upgrade(url)
        for name, seconds in uvloop.run(measure(url, told.rounds, told.sizes)).items():
            print(f"{name}: least {1e6 * min(seconds):.0f} us, median {1e6 * statistics.median(seconds):.0f} us")


if __name__ == "__main__":
    main()
