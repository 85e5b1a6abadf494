"""Load generator for any OpenAI-compatible server: TTFT, inter-token latency, throughput, as JSON.

Closed loop (`--concurrency N`: N clients, each sends its next request when the last one ended) or open loop
(`--rate R`: Poisson arrivals at R requests/s, whatever the server does; lateness then shows as latency, so there
is no coordinated omission). Workloads: `random` (every prompt differs from its first token on) and `shared` (a
common prefix of --prefix-tokens before --input-tokens of its own). Prompts are token ids on /v1/completions, so
lengths are exact; a server that takes no ids can be driven with `--endpoint chat` (words instead of tokens).

    python benchmarks/serve.py --base-url http://127.0.0.1:8080/v1 --api-key hg_live_... --model headgate-demo \\
        --workload shared --prefix-tokens 1024 --concurrency 8 --num-requests 64
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

FIRST_ORDINARY_TOKEN = 300
"""Below it lie special tokens and single bytes in most vocabularies."""


@dataclass(frozen=True)
class Load:
    """The requests that are sent."""

    base_url: str
    api_key: str
    model: str
    endpoint: str = "completions"
    workload: str = "random"
    num_requests: int = 32
    concurrency: int = 8
    rate: float = 0.0
    input_tokens: int = 128
    prefix_tokens: int = 0
    output_tokens: int = 64
    vocab_size: int = 4000
    seed: int = 0
    timeout_s: float = 600.0


@dataclass
class Record:
    """One request as its client saw it; seconds on one monotonic clock."""

    scheduled: float
    sent: float = 0.0
    first: float = 0.0
    last: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    headgate: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def prompts(load: Load) -> list[list[int]]:
    """Returns token ids; with workload `shared` the first `prefix_tokens` are equal in all prompts."""
    rng = random.Random(load.seed)

    def draw(count: int) -> list[int]:
        return [rng.randrange(FIRST_ORDINARY_TOKEN, load.vocab_size) for _ in range(count)]

    prefix = draw(load.prefix_tokens) if load.workload == "shared" else []
    own = load.input_tokens + (0 if prefix else load.prefix_tokens)
    return [prefix + draw(own) for _ in range(load.num_requests)]


def body(load: Load, prompt: list[int]) -> tuple[str, dict[str, Any]]:
    common: dict[str, Any] = {
        "model": load.model,
        "max_tokens": load.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    if load.endpoint == "completions":
        return "/completions", {**common, "prompt": prompt}
    text = " ".join(f"w{token}" for token in prompt)
    return "/chat/completions", {**common, "messages": [{"role": "user", "content": text}]}


async def run(load: Load) -> dict[str, Any]:
    """Sends everything, returns the report."""
    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    headers = {"Authorization": f"Bearer {load.api_key}"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers, connector=connector) as session:
        start = time.perf_counter()
        drive = open_loop if load.rate > 0 else closed_loop
        records = await drive(load, session)
        wall_s = time.perf_counter() - start
    return report(load, records, wall_s)


async def closed_loop(load: Load, session: aiohttp.ClientSession) -> list[Record]:
    queue = iter(prompts(load))
    records: list[Record] = []

    async def client() -> None:
        for prompt in queue:
            record = Record(scheduled=time.perf_counter())
            records.append(record)
            await send(load, session, prompt, record)

    await asyncio.gather(*(client() for _ in range(load.concurrency)))
    return records


async def open_loop(load: Load, session: aiohttp.ClientSession) -> list[Record]:
    rng = random.Random(load.seed + 1)
    records: list[Record] = []
    due = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for prompt in prompts(load):
            due += rng.expovariate(load.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            record = Record(scheduled=due)
            records.append(record)
            group.create_task(send(load, session, prompt, record))
    return records


async def send(load: Load, session: aiohttp.ClientSession, prompt: list[int], record: Record) -> None:
    path, content = body(load, prompt)
    record.sent = time.perf_counter()
    try:
        async with session.post(load.base_url.rstrip("/") + path, json=content) as answer:
            if answer.status != 200:
                record.error = f"{answer.status}: {(await answer.text())[:200]}"
                return
            async for event in events(answer):
                take(record, event)
    except (aiohttp.ClientError, TimeoutError) as error:
        record.error = f"{type(error).__name__}: {error}"
    record.last = time.perf_counter()


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Returns the JSON events of a server-sent stream up to [DONE]; comments are skipped."""
    async for line in answer.content:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def take(record: Record, event: dict[str, Any]) -> None:
    now = time.perf_counter()
    if "error" in event:
        record.error = str(event["error"])
    if event.get("usage"):
        record.usage = event["usage"]
    if event.get("headgate"):
        record.headgate = event["headgate"]
    for choice in event.get("choices", ()):
        if choice.get("text") or choice.get("delta", {}).get("content"):
            record.first = record.first or now
            record.chunk_times.append(now)


def report(load: Load, records: list[Record], wall_s: float) -> dict[str, Any]:
    good = [r for r in records if not r.error and r.usage]
    output = sum(r.usage["completion_tokens"] for r in good)
    prompt = sum(r.usage["prompt_tokens"] for r in good)
    cached = sum((r.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0 for r in good)
    timed = [r for r in good if r.first]
    gaps = [b - a for r in timed for a, b in zip(r.chunk_times, r.chunk_times[1:], strict=False)]
    return {
        "load": {key: value for key, value in asdict(load).items() if key != "api_key"},
        "num_requests": len(records),
        "num_errors": len(records) - len(good),
        "errors": sorted({r.error for r in records if r.error})[:5],
        "wall_s": round(wall_s, 4),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": output,
        "output_tokens_per_s": round(output / wall_s, 2),
        "total_tokens_per_s": round((output + prompt) / wall_s, 2),
        "requests_per_s": round(len(good) / wall_s, 3),
        "ttft_ms": spread([r.first - r.scheduled for r in timed]),
        "inter_token_ms": spread(gaps),
        "time_per_output_token_ms": spread(
            [(r.last - r.first) / (r.usage["completion_tokens"] - 1) for r in timed if r.usage["completion_tokens"] > 1]
        ),
        "e2e_ms": spread([r.last - r.scheduled for r in good]),
        "outside_engine_ms": spread([outside_engine_s(r) for r in good if r.headgate]),
    }


def outside_engine_s(record: Record) -> float:
    """Seconds of a request that its worker does not account for: client, HTTP, gateway, both sockets."""
    inside_ms = sum(record.headgate.get(key) or 0 for key in ("queue_ms", "prefill_ms", "decode_ms"))
    return record.last - record.sent - inside_ms / 1000


def spread(seconds: list[float]) -> dict[str, float] | None:
    """Returns p50, p90, p99 and mean in milliseconds; None without values."""
    if not seconds:
        return None
    ordered = sorted(seconds)

    def at(share: float) -> float:
        return round(1000 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 3)

    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "mean": round(1000 * statistics.fmean(ordered), 3)}


def parse(arguments: list[str]) -> tuple[Load, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Load("", "", "")
    parser.add_argument("--base-url", default="http://127.0.0.1:8080/v1")
    parser.add_argument("--api-key", default=os.environ.get("HEADGATE_API_KEY", ""), help="default: $HEADGATE_API_KEY")
    parser.add_argument("--model", default="headgate-demo")
    parser.add_argument("--endpoint", choices=("completions", "chat"), default=default.endpoint)
    parser.add_argument("--workload", choices=("random", "shared"), default=default.workload)
    for name in ("num_requests", "concurrency", "input_tokens", "prefix_tokens", "output_tokens", "vocab_size", "seed"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(default, name))
    parser.add_argument("--rate", type=float, default=0.0, help="requests/s, open loop; 0: closed loop")
    parser.add_argument("--timeout-s", type=float, default=default.timeout_s)
    parser.add_argument("--json", type=Path, help="also write the report there")
    values = vars(parser.parse_args(arguments))
    path = values.pop("json")
    return Load(**values), path


def main() -> None:
    load, path = parse(sys.argv[1:])
    result = asyncio.run(run(load))
    text = json.dumps(result, indent=2)
    print(text)
    if path is not None:
        path.write_text(text + "\n")
    sys.exit(1 if result["num_errors"] else 0)


if __name__ == "__main__":
    main()
