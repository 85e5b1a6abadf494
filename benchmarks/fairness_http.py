"""A flood through a real server: the same victim alone and beside a flood, in one run; then tenants who always have more.

    headgate up --ready-file ready.json
    python benchmarks/fairness.py --http ready.json

Capacity is measured first (a closed loop); the flood is an open loop at ten times that, the victim sends a tenth of its
share of one among two. Client and server share the machine, so the flood's own sending is part of what is measured.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from serve import Load, Record, closed_loop, open_loop, report

FLOOD = 10.0
NUM_EQUALS = 4
CLIENTS = 12
"""The number of clients in the closed loop that measures the capacity."""


async def new_tenant(ready: dict[str, Any], name: str) -> str:
    """Creates a tenant and returns its key."""
    headers = {"Authorization": f"Bearer {ready['admin_key']}"}
    projects = ready["base_url"].removesuffix("/v1") + "/v1/organization/projects"
    async with aiohttp.ClientSession(headers=headers, raise_for_status=True) as admin:
        async with admin.post(projects, json={"name": name}) as answer:
            project = await answer.json()
        accounts = f"{projects}/{project['id']}/service_accounts"
        async with admin.post(accounts, json={"name": "load"}) as answer:
            return str((await answer.json())["api_key"]["value"])


def session_of(load: Load) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {load.api_key}"},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=load.timeout_s),
    )


async def drive(load: Load) -> list[Record]:
    async with session_of(load) as session:
        return await (open_loop if load.rate else closed_loop)(load, session)


async def until(seconds: float, load: Load) -> list[Record]:
    """A closed loop that is stopped; the records of requests that ended."""
    records: list[Record] = []

    async def client(number: int, session: aiohttp.ClientSession) -> None:
        for turn in range(10**6):
            one = replace(load, seed=load.seed + 1000 * number + turn, num_requests=1, concurrency=1)
            records.extend(await closed_loop(one, session))

    async with session_of(load) as session:
        clients = [asyncio.create_task(client(n, session)) for n in range(load.concurrency)]
        await asyncio.sleep(seconds)
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    return records


async def flooding(key: str, rate: float, load: Load) -> asyncio.subprocess.Process:
    """Starts the flood in a process of its own, because its sending must not slow the victim's clock."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        Path(__file__).with_name("flood.py"),
        "--base-url",
        load.base_url,
        "--key",
        key,
        "--model",
        load.model,
        "--rate",
        str(rate),
        "--seconds",
        "600",
        "--input-tokens",
        str(load.input_tokens),
        "--output-tokens",
        str(load.output_tokens),
        stdout=asyncio.subprocess.PIPE,
    )


async def flood(base: Load, ready: dict[str, Any], run_id: str, num_requests: int) -> dict[str, Any]:
    keys = [await new_tenant(ready, f"{name}-{run_id}") for name in ("victim", "flood")]
    warm = await until(10.0, replace(base, api_key=keys[1], concurrency=CLIENTS, seed=7))
    full = sum(not r.error for r in warm) / 10.0
    if not full:
        raise SystemExit("Nothing ended within ten seconds: is something else running here?")
    victim = replace(base, api_key=keys[0], rate=0.05 * full, num_requests=num_requests)
    alone = report(victim, await drive(victim), 1.0)
    print("capacity", full, "alone", alone["ttft_ms"], file=sys.stderr)
    sending = await flooding(keys[1], FLOOD * full, base)
    await asyncio.sleep(5.0)
    victim = replace(victim, seed=1)
    among = report(victim, await drive(victim), 1.0)
    sending.terminate()
    told, _ = await sending.communicate()
    ratio = {p: among["ttft_ms"][p] / alone["ttft_ms"][p] for p in ("p50", "p99")}
    return {
        "capacity_requests_per_s": full,
        "alone_ms": alone["ttft_ms"],
        "flood_ms": among["ttft_ms"],
        "ratio": ratio,
        "victim_errors": among["errors"],
        "requests": num_requests,
        "flood": json.loads(told),
        "target": 1.5,
    }


async def backlog(base: Load, ready: dict[str, Any], run_id: str, seconds: float, num_clients: int) -> dict[str, Any]:
    """Equal weight, unequal prompts: what a tenant is charged is its prompt tokens and twice its output tokens. With
    fewer clients in all than a worker runs at a time nobody waits, and nothing is shared out."""
    shapes = [(64, 16), (128, 16), (192, 8), (32, 32)]
    loads = [
        replace(
            base,
            api_key=await new_tenant(ready, f"equal{n}-{run_id}"),
            concurrency=num_clients,
            input_tokens=shapes[n][0],
            output_tokens=shapes[n][1],
            seed=n * 10**6,
        )
        for n in range(NUM_EQUALS)
    ]
    answers = await asyncio.gather(*(until(seconds, load) for load in loads))
    charges = []
    for records in answers:
        usages = [r.usage for r in records if r.usage and not r.error]
        charges.append(sum(u["prompt_tokens"] + 2 * u["completion_tokens"] for u in usages))
    jain = sum(charges) ** 2 / (len(charges) * sum(c * c for c in charges))
    return {"jain": jain, "charges": charges, "seconds": seconds, "target": 0.95}


async def both(
    ready: dict[str, Any], seconds: float, num_requests: int, only: str, num_tokens: tuple[int, int], num_clients: int
) -> dict[str, Any]:
    base = Load(
        base_url=ready["base_url"].removesuffix("/v1") + "/v1",
        api_key="",
        model=ready["model"],
        input_tokens=num_tokens[0],
        output_tokens=num_tokens[1],
    )
    run_id = str(int(time.time()))
    figures: dict[str, Any] = {}
    if only in ("", "backlog"):
        figures["backlog"] = await backlog(base, ready, run_id, seconds, num_clients)
        print("backlog", figures["backlog"], file=sys.stderr)
    if only in ("", "flood"):
        figures["flood"] = await flood(base, ready, run_id, num_requests)
    return figures
