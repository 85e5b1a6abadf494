"""Conversations over two workers: how much of their prompts is found cached, by the router's rule and by others.

    python benchmarks/router.py [--workers 2] [--conversations 8] [--turns 6] [--rounds 3] [--json FILE]

Starts `headgate up` with the demo model and beside it a gateway of this process, whose rule is changed between
measurements: `random`, `least load` (the fewest running and waiting sequences, then turns) and `router`
(gateway/routing/placement.py). Each measurement is a tenant of its own, so nothing is cached when it begins. Conversations run at
the same time, each waits for its answer before its next turn. Hit rate: cached tokens / prompt tokens of all turns but
the first. Time: from sending to the last byte of an answer, as its client sees it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from gateway.app import create_app
from gateway.base.settings import GatewaySettings
from gateway.generation.stream import GENERATION
from gateway.http.http_limits import ConnectionLimits, GatewayRunner
from gateway.routing.placement import Candidate, Choose, Placement, Wanted, place

WORDS = ("canal", "gate", "water", "valley", "measure", "share", "field", "season", "keeper", "stone", "river")
SLOT = 9


def random_rule(candidates: Sequence[Candidate], _: Wanted, turn: int = 0) -> Placement:
    chosen = random.choice(candidates)
    return Placement(chosen.worker, "load", 0, 0, 0.0)


def least_load(candidates: Sequence[Candidate], _: Wanted, turn: int = 0) -> Placement:
    least = min(c.num_sequences for c in candidates)
    equal = sorted(c.worker for c in candidates if c.num_sequences == least)
    return Placement(equal[turn % len(equal)], "load", 0, 0, 0.0)


RULES: dict[str, Choose] = {"random": random_rule, "least load": least_load, "router": place}


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


@contextlib.contextmanager
def serving(home: Path, num_workers: int) -> Iterator[dict[str, Any]]:
    """Runs `headgate up` and yields the content of its ready file."""
    ready = home / "ready.json"
    command = [
        str(Path(sys.executable).parent / "headgate"),
        "up",
        "--home",
        str(home / "home"),
        "--port",
        "0",
        "--workers",
        str(num_workers),
        "--ready-file",
        str(ready),
    ]
    with (home / "up.txt").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ})
    try:
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit((home / "up.txt").read_text()[-2000:])
            time.sleep(0.1)
        yield json.loads(ready.read_text())
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


@contextlib.asynccontextmanager
async def own_gateway(
    home: Path, ready: dict[str, Any], num_workers: int
) -> AsyncIterator[tuple[web.Application, str]]:
    """Runs a gateway beside those of `headgate up`, with a journal of its own. Yields (application, URL)."""
    settings = GatewaySettings(
        home=home,
        slot=SLOT,
        redis_url=f"unix://{home / 'run/redis.sock'}?db=0",
        models={ready["model"]: {"path": ready["model_path"]}},
        log_level="WARNING",
    )
    app = create_app(settings)
    runner = GatewayRunner(app, ConnectionLimits.of(settings), shutdown_timeout=2.0)
    await runner.setup()
    try:
        sock = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, sock).start()
        fleet = app[GENERATION].fleet
        while len([link for link in fleet.links if link.cached.seq >= 0]) < num_workers:  # noqa: ASYNC110 - other processes have no event
            await asyncio.sleep(0.05)
        yield app, f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        await runner.cleanup()


async def tenant_key(ready: dict[str, Any], name: str) -> str:
    headers = {"Authorization": f"Bearer {ready['admin_key']}"}
    async with aiohttp.ClientSession(ready["base_url"], headers=headers) as session:
        path = "/v1/organization/projects"
        async with session.post(path, json={"name": name}) as answer:
            project = (await answer.json())["id"]
        async with session.post(f"{path}/{project}/service_accounts", json={"name": "b"}) as answer:
            return str((await answer.json())["api_key"]["value"])


async def conversation(
    session: aiohttp.ClientSession, model: str, number: int, num_turns: int, seed: int
) -> list[dict[str, float]]:
    rng = random.Random(f"{seed}-{number}")
    messages = [{"role": "system", "content": words(rng, 150)}]
    turns = []
    for _ in range(num_turns):
        messages.append({"role": "user", "content": words(rng, 30)})
        body = {"model": model, "messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        began = time.perf_counter()
        async with session.post("/v1/chat/completions", json=body) as answer:
            answer.raise_for_status()
            reply = await answer.json()
        usage, cache = reply["usage"], reply["headgate"]["cache"]
        messages.append(reply["choices"][0]["message"])
        turns.append(
            {
                "prompt": usage["prompt_tokens"],
                "cached": usage["prompt_tokens_details"]["cached_tokens"],
                "seconds": time.perf_counter() - began,
                "other_worker": cache["miss_reason"] == "other_worker",
            }
        )
        await asyncio.sleep(rng.random() * 0.05)
    return turns


async def measure(
    app: web.Application, url: str, ready: dict[str, Any], rule: str, load: argparse.Namespace, seed: int
) -> dict[str, float]:
    app[GENERATION].router._rule = RULES[rule]
    key = await tenant_key(ready, f"{rule} {seed}")
    headers = {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession(url, headers=headers) as session:
        began = time.perf_counter()
        talks = await asyncio.gather(
            *(conversation(session, ready["model"], n, load.turns, seed) for n in range(load.conversations))
        )
        wall_s = time.perf_counter() - began
    later = [turn for talk in talks for turn in talk[1:]]
    return {
        "hit_rate": sum(turn["cached"] for turn in later) / sum(turn["prompt"] for turn in later),
        "median_s": statistics.median(turn["seconds"] for turn in later),
        "wall_s": wall_s,
    }


async def run(load: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {rule: [] for rule in RULES}
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        with serving(home, load.workers) as ready:
            async with own_gateway(home / "home", ready, load.workers) as (app, url):
                for number in range(load.rounds):
                    for rule in RULES:
                        found[rule].append(await measure(app, url, ready, rule, load, number))
    return {
        rule: {name: statistics.median(r[name] for r in rounds) for name in rounds[0]} for rule, rounds in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    load = parser.parse_args()
    results = asyncio.run(run(load))
    for rule, figures in results.items():
        ratio = results["router"]["hit_rate"] / figures["hit_rate"] if figures["hit_rate"] else 0.0
        print(
            f"{rule:<12} hit rate {figures['hit_rate']:.3f}  (router / this: {ratio:.2f})  "
            f"median answer {figures['median_s'] * 1e3:.0f} ms  all {figures['wall_s']:.1f} s"
        )
    if load.json:
        facts = {
            "load": {k: v for k, v in vars(load).items() if k != "json"},
            "cpus": os.cpu_count(),
            "machine": platform.machine(),
        }
        load.json.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
