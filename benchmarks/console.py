"""How long the console's pages take over big books: 10 million ledger rows of 30 days and a full request log.

    python benchmarks/console.py [--rows 10000000] [--log-rows 1000000] [--home kept] [--json out.json]

The gateway runs in this process on a database that SQL fills (the shapes are those of `usage_queries.py` and
`request_log.py`); the pages are asked for one after the other over HTTP, as an operator and as a tenant. Reported: median
and slowest of the repeats, after one that is not counted. A home that is named stays, and is filled only once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import request_log  # noqa: E402 - the folder of this script
import usage_queries  # noqa: E402 - as above
from console_pages import Browser, signed_in  # noqa: E402 - tests/ is on the path only now
from gateways import PEPPER, RunningGateway, running_gateway  # noqa: E402 - as above
from sqlalchemy import create_engine, insert, select, text  # noqa: E402 - as above

from accounting.access import api_keys  # noqa: E402 - as above
from accounting.requests import label_usage  # noqa: E402 - as above
from accounting.tables.models import Tenant  # noqa: E402 - as above
from gateway.base.app_keys import DATABASE  # noqa: E402 - as above
from gateway.cli.embedded import find_server, server_command  # noqa: E402 - as above
from gateway.console.navigation import screens_of  # noqa: E402 - as above

DAY_S = 86_400
NUM_TENANTS = 20
TENANT_ID = "proj_3"
LARGE = ("/usage?width=minute&group=key", "/usage/labels")
"""Pages with many sums that no menu leads to."""
LABELS = """
INSERT INTO label_usage (tenant_id, label, day_ms, value, model, currency, num_requests, prompt_tokens, cached_tokens, output_tokens, charge)
SELECT :tenant, 'end_user', :day_ms, 'user ' || n, 'model-0', 'USD', 3, 3000, 2000, 300, n
FROM (WITH RECURSIVE s(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM s WHERE n < :most) SELECT n FROM s)
"""
TARGET_MS = 200


async def measure(home: Path, redis_url: str, num_rows: int, num_log_rows: int, repeats: int) -> dict[str, Any]:
    is_filled = (home / "filled").exists()
    async with running_gateway(home, redis_url) as gateway:
        key = await add_tenants(gateway, 0 if is_filled else NUM_TENANTS)
    if not is_filled:
        fill(home, num_rows, num_log_rows)
    found: dict[str, Any] = {}
    async with running_gateway(home, redis_url) as gateway:
        for role, secret in (("operator", gateway.keys.admin_key), ("admin", key)):
            async with signed_in(gateway, secret) as browser:
                for path in [*(screen.path for screen in screens_of(role)), *LARGE]:
                    name = f"{role} {path or '/'}"
                    found[name] = await timed(browser, path, repeats)
                    print(f"{name:34} " + "  ".join(f"{k} {v}" for k, v in found[name].items()), flush=True)
    return found


def fill(home: Path, num_rows: int, num_log_rows: int) -> None:
    url = f"sqlite:///{home / 'headgate.db'}"
    end = int(time.time()) // 60 * 60
    began = time.perf_counter()
    usage_queries.fill(url, num_rows, end - 30 * DAY_S, end)
    request_log.fill(url, num_log_rows, int(time.time() * 1000) - num_log_rows * 100)
    engine = create_engine(url)
    with engine.begin() as conn:
        for day in range(end // DAY_S - 30, end // DAY_S + 1):
            day_sums = {"tenant": TENANT_ID, "day_ms": day * label_usage.DAY_MS, "most": label_usage.MAX_SUMS}
            conn.execute(text(LABELS), day_sums)
    engine.dispose()
    (home / "filled").touch()
    print(f"filled in {time.perf_counter() - began:.0f} s", flush=True)


async def add_tenants(gateway: RunningGateway, number: int) -> str:
    """Adds the tenants of the rows. Returns a new key of one of them."""
    async with gateway.app[DATABASE].write() as conn:
        query = select(Tenant.__table__).where(Tenant.name == "default")
        like = dict((await conn.execute(query)).mappings().one())
        rows = [like | {"id": f"proj_{n}", "name": f"tenant {n}"} for n in range(number)]
        if rows:
            await conn.execute(insert(Tenant), rows)
        made = await api_keys.create(conn, PEPPER, tenant_id=TENANT_ID, now=int(time.time()))
    return made.value


async def timed(browser: Browser, path: str, repeats: int) -> dict[str, float]:
    """Returns the times of a page, or its status if it was refused."""
    times = []
    for number in range(repeats + 1):
        began = time.perf_counter()
        page = await browser.get(path)
        if number:
            times.append(1000 * (time.perf_counter() - began))
        if page.status >= 400:
            print(f"{path} answered {page.status}: {page.words[-120:]}", flush=True)
            return {"status": page.status}
    return {"median_ms": round(statistics.median(times), 1), "slowest_ms": round(max(times), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--log-rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--home", type=Path, help="a folder that is kept; without it a temporary one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headgate-console-") as folder:
        home, kept = Path(folder), options.home or Path(folder) / "home"
        redis = subprocess.Popen(server_command(find_server(), home, home / "redis.sock"), stdout=subprocess.DEVNULL)
        try:
            while not (home / "redis.sock").exists():
                time.sleep(0.05)
            url = f"unix://{home / 'redis.sock'}"
            found = asyncio.run(measure(kept, url, options.rows, options.log_rows, options.repeats))
        finally:
            redis.terminate()
            redis.wait()
    slowest = max(figures.get("median_ms", 0) for figures in found.values())
    machine = {"cpus": os.cpu_count(), "platform": platform.platform()}
    print(f"slowest page: {slowest} ms of {TARGET_MS}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "pages": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
