"""The time for which one request stops everybody else on a gateway: the largest lag of its loop, shape by shape.

    python benchmarks/loop_lag.py [--rounds 3] [--json out.json]

The gateway runs in this process as `headgate up` starts one, with nothing beside it but a task that sleeps a
millisecond and sees how late it wakes.
A worker (scripted, no model) and the client that sends the bodies are processes of their own. `idle` is the lag of the
machine and of this measurement: on a busy machine read the others against it.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

from fakes import ScriptedRunner, ScriptedWorker  # noqa: E402 - tests/ is on the path only now
from gateways import MODEL, running_gateway  # noqa: E402 - as above

from gateway.__main__ import answer_promptly, keep_memory_whole  # noqa: E402 - tests/ is on the path only now
from gateway.cli.embedded import find_server, server_command  # noqa: E402 - as above
from gateway.server import collect_seldom  # noqa: E402 - tests/ is on the path only now

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CONTEXT = 2**19
MIB = 2**20
TICK_S = 0.001
QUIET_S = 1.0
FULL_MIB = 4


def _chat(content: str = "hi", **more: Any) -> bytes:
    message = {"role": "user", "content": content}
    fields = {"model": MODEL, "messages": [message], "max_tokens": 1} | more
    return json.dumps(fields).encode()


def _complete(prompt: Any, **more: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 1} | more).encode()


def _filled(character: str, num_bytes: int) -> str:
    return character * (num_bytes // len(json.dumps(character)[1:-1]))


def _messages(number: int) -> bytes:
    message = {"role": "user", "content": "x"}
    return json.dumps({"model": MODEL, "messages": [message] * number, "max_tokens": 1}).encode()


SHAPES: dict[str, tuple[str, Callable[[], bytes]]] = {
    "1,150,000 keys": (CHAT, lambda: _chat(x={f"k{i}": 1 for i in range(1_150_000)})),
    "98,000 keys": (CHAT, lambda: _chat(x={f"k{i}": 1 for i in range(98_000)})),
    "98,000 unknown fields": (CHAT, lambda: _chat(**{f"k{i}": 1 for i in range(98_000)})),
    "5,000,000 token ids": (COMPLETIONS, lambda: _complete([7] * 5_000_000)),
    "390,000 token ids": (COMPLETIONS, lambda: _complete([255] * 390_000)),
    "128 prompts of 3,000 ids": (COMPLETIONS, lambda: _complete([[255] * 3_000] * 128)),
    "99,000 messages": (CHAT, lambda: _messages(99_000)),
    "10,000 messages": (CHAT, lambda: _messages(10_000)),
    "15 MB of broken JSON": (CHAT, lambda: b'{"a": ["' + b'x\\"' * 5_000_000),
    "full: broken JSON": (CHAT, lambda: b'{"a": ["' + b'x\\"' * (FULL_MIB * MIB // 3 - 9)),
    "full: quotes": (CHAT, lambda: b"{" + b'"' * (FULL_MIB * MIB - 2)),
    "full: one letter": (CHAT, lambda: _chat(_filled("a", FULL_MIB * MIB - 200))),
    "full: newlines": (CHAT, lambda: _chat(_filled("\n", FULL_MIB * MIB - 200))),
    "full: escapes": (CHAT, lambda: _chat(_filled("\u4e2d", FULL_MIB * MIB - 200))),
    "full: control tokens": (CHAT, lambda: _chat("<|eos|>" * (FULL_MIB * MIB // 7 - 50))),
    "380,000 letters": (CHAT, lambda: _chat("a" * 380_000)),
    "380,000 letters to /tokenize": ("/tokenize", lambda: _complete("a" * 380_000)),
    "390,000 ids to /detokenize": (
        "/detokenize",
        lambda: json.dumps({"model": MODEL, "tokens": [65] * 390_000}).encode(),
    ),
    "390,000 ids to /v1/quotes": (
        "/v1/quotes",
        lambda: b'{"endpoint": "/v1/completions", "body": ' + _complete([255] * 390_000) + b"}",
    ),
    "echo of 40,000 ids, logprobs 5": (COMPLETIONS, lambda: _complete([65] * 40_000, echo=True, logprobs=5)),
    "2 MB schema": (
        CHAT,
        lambda: _chat(
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": {"enum": ["word"] * 250_000}},
            }
        ),
    ),
}


def _post(port: int, key: str, shape: str, answers: Any) -> None:
    """Sends one request from a process of its own and answers with its status and seconds."""
    path, make = SHAPES[shape]
    body = make()
    answers.put(len(body))
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    started = time.perf_counter()
    try:
        connection.request("POST", path, body, headers)
        status = connection.getresponse().status
    except OSError:  # refused by its head alone, while it was still being sent
        status = 413
    answers.put((status, time.perf_counter() - started))


def _work(path: str, redis_url: str) -> None:
    async def serve() -> None:
        runner = ScriptedRunner(num_blocks=CONTEXT // 16 * 2, max_model_len=CONTEXT)
        async with ScriptedWorker(Path(path), redis_url=redis_url, runner=runner):
            await asyncio.Event().wait()

    asyncio.run(serve())


class Lag:
    def __init__(self) -> None:
        self.worst_s = 0.0

    async def watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self.worst_s = max(self.worst_s, time.perf_counter() - before - TICK_S)


async def measure(home: Path, redis_url: str, rounds: int, wanted: str) -> dict[str, Any]:
    spawn = multiprocessing.get_context("spawn")
    worker = spawn.Process(target=_work, args=(str(home / "w.sock"), redis_url), daemon=True)
    worker.start()
    found: dict[str, Any] = {}
    try:
        async with running_gateway(home / "home", redis_url, max_model_len=CONTEXT) as gateway:
            await gateway.workers(1, 60)
            collect_seldom()
            lag = Lag()
            watching = asyncio.create_task(lag.watch())
            await asyncio.sleep(QUIET_S)
            lag.worst_s = 0.0
            await asyncio.sleep(2 * QUIET_S)
            found["idle"] = {"lag_ms": round(lag.worst_s * 1e3, 1)}
            _show("idle", found["idle"])
            for shape in [shape for shape in SHAPES if wanted in shape]:
                lags, said = [], (0, 0.0)
                for _ in range(rounds):
                    answers = spawn.Queue()
                    args = (gateway.port, gateway.keys.api_key, shape, answers)
                    client = spawn.Process(target=_post, args=args, daemon=True)
                    client.start()
                    num_bytes = await asyncio.to_thread(answers.get)
                    lag.worst_s = 0.0
                    said = await asyncio.to_thread(answers.get)
                    await asyncio.sleep(0.2)
                    lags.append(lag.worst_s)
                    await asyncio.to_thread(client.join)
                found[shape] = {
                    "status": said[0],
                    "mb": round(num_bytes / 1e6, 1),
                    "seconds": round(said[1], 2),
                    "lag_ms": round(min(lags) * 1e3, 1),
                    "worst_lag_ms": round(max(lags) * 1e3, 1),
                }
                _show(shape, found[shape])
            watching.cancel()
    finally:
        worker.kill()
        worker.join()
    return found


def _show(shape: str, figures: dict[str, Any]) -> None:
    print(f"{shape:34} " + "  ".join(f"{k} {v}" for k, v in figures.items()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="shapes with this in their name")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    keep_memory_whole()
    answer_promptly()
    with tempfile.TemporaryDirectory(prefix="headgate-lag-") as folder:
        home = Path(folder)
        server = find_server()
        redis = subprocess.Popen(server_command(server, home, home / "redis.sock"), stdout=subprocess.DEVNULL)
        try:
            while not (home / "redis.sock").exists():
                time.sleep(0.05)
            url = f"unix://{home / 'redis.sock'}"
            found = uvloop.run(measure(home, url, options.rounds, options.only))
        finally:
            redis.terminate()
            redis.wait()
    if options.json:
        found = {"cores": os.cpu_count(), "rounds": options.rounds, "shapes": found}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
