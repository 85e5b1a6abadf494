"""Fairness in simulated time: the real engine, scheduler and cache, a device whose steps take a + b * tokens + c * kv.

    python benchmarks/fairness.py            # all scenarios, a table and JSON on stdout
    python benchmarks/fairness.py --policy fcfs   # the same in the order of arrival: the baseline
    python benchmarks/fairness.py --model D  # flood and backlog in real time: a model of this machine in the same engine
    python benchmarks/fairness.py --http F   # the same through the server whose ready file F is

flood     one tenant sends ten times what the device can do, another a tenth of its share: the other's p99 time to first
          token, as a ratio to the same requests sent to an idle device
slow      the same flood on a slow device (a CPU's pace), with requests of three lengths
backlog   four tenants of equal weight who always have more to send: Jain index of tokens served
batch     interactive load with and without a batch lane that never ends: p99 time to first token, as a ratio; and the
          share of the budget left over that batch got
overload  twice what the device can do, clients that come again when they are told: how many of them are let in then

No clock is read: the same code gives the same figures anywhere. The default pace is that of an 8B model on one H200,
derived (engine.md 7.2), not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from fairness_http import both
from fairness_world import (
    NUM_BLOCKS,
    PACE,
    SLOW_PACE,
    TARGET_S,
    Client,
    Real,
    Simulated,
    World,
    jain_of,
    p99,
    percentiles,
    poisson,
)

from workers.protocol.messages import SamplingParams


def capacity(seconds: float = 20.0) -> float:
    """Returns the requests per second that end when there is always more to do."""
    clients = poisson("load", 400, seconds, 0)
    world = World(clients).run(seconds)
    done = [c for c in clients if seconds / 2 < c.ended]
    assert world.device.now >= seconds
    return len(done) / (seconds / 2)


def flood(full: float, seconds: float, policy: str) -> dict[str, dict[str, float | None]]:
    """Short prompts fit one step, so waiting for the step under way weighs most; long ones take several."""
    return {
        "long_prompts": _flood(full, seconds, policy, (1000, 6000)),
        "short_prompts": _flood(full, seconds, policy, (200, 1000)),
    }


def _flood(full: float, seconds: float, policy: str, prompt: tuple[int, int]) -> dict[str, float | None]:
    """Measures a flood. Times are of the requests that were let in."""
    # A tenth of the share of one among two; a request of the flood has 600 tokens.
    rate = 0.1 * full / 2 * 600 / (sum(prompt) / 2)
    seconds = max(seconds, 5 + 150 / rate)

    def victims() -> list[Client]:
        return poisson("victim", rate, seconds, 1, prompt=prompt, since=5.0)

    alone, among = victims(), victims()
    World(alone, policy=policy).run(seconds + 5)
    World(among + poisson("flood", 10 * full, seconds, 2), policy=policy).run(seconds + 5)
    refused = sum(bool(c.refusals) for c in among)
    return {
        "alone_p99_s": p99(alone),
        **_beside(alone, among),
        "requests": len(among),
        "refused": refused,
        "target": 1.5,
    }


def _beside(alone: list[Client], among: list[Client]) -> dict[str, float | None]:
    """Compares times to the first token. There is no 99th percentile with fewer than 100 requests that were let in."""
    served = [c.ttft for c in among if c.first >= 0]
    slowest = p99(among) if len(served) >= 100 else None
    return {
        "flood_p99_s": slowest,
        "ratio": None if slowest is None else slowest / p99(alone),
        "median_ratio": statistics.median(served) / statistics.median(c.ttft for c in alone) if served else None,
    }


def slow(full: float, seconds: float, policy: str) -> dict[str, dict[str, float | None]]:
    """The flood on a slow device, where the step under way weighs more, with prompts and outputs of three lengths."""
    return {
        f"{prompt} and {output}": _slow(prompt, output, policy) for prompt, output in ((128, 16), (512, 64), (1024, 64))
    }


def _slow(prompt: int, output: int, policy: str) -> dict[str, float | None]:
    def arrivals(tenant: str, rate: float, until: float, seed: int, since: float = 0.0) -> list[Client]:
        lens = (prompt, prompt), (output, output)
        return poisson(tenant, rate, until, seed, prompt=lens[0], output=lens[1], since=since)

    def run(clients: list[Client], until: float) -> World:
        return World(clients, device=Simulated(SLOW_PACE), policy=policy).run(until)

    load = arrivals("load", 400, 20.0, 0)
    run(load, 20.0)
    full = sum(client.ended > 10.0 for client in load) / 10.0
    rate = 0.1 * full / 2
    seconds = 5 + 150 / rate
    alone, among = (arrivals("victim", rate, seconds, 1, since=5.0) for _ in range(2))
    run(alone, seconds + 5)
    run(among + arrivals("flood", 10 * full, seconds, 2), seconds + 5)
    return {"alone_p99_s": p99(alone), **_beside(alone, among), "requests": len(among), "target": 1.5}


def backlog(full: float, seconds: float, policy: str) -> dict[str, float]:
    """Tenants differ in prompt and output length: equal service is equal charge (1 a prompt token, 2 an output token)."""
    shapes = {
        "chat": ((200, 1000), (20, 80)),
        "short": ((50, 100), (20, 40)),
        "long": ((2000, 4000), (10, 20)),
        "talk": ((50, 200), (100, 200)),
    }
    clients = []
    for number, (tenant, (prompt, output)) in enumerate(shapes.items()):
        clients += poisson(tenant, 3 * full, seconds, number, prompt=prompt, output=output)
    World(clients, policy=policy).run(seconds)
    return {**jain_of(clients), "target": 0.95}


def batch(full: float, seconds: float, policy: str) -> dict[str, float]:
    def chats() -> list[Client]:
        return [c for i in range(4) for c in poisson(f"chat{i}", 0.7 * full / 4, seconds, i)]

    alone, beside = chats(), chats()
    World(alone, policy=policy).run(seconds + 5)
    lane = poisson("jobs", full, seconds, 9, tier="batch")
    world = World(beside + lane, policy=policy).run(seconds)
    return {
        "alone_p99_s": p99(alone),
        "batch_p99_s": p99(beside),
        "ratio": p99(beside) / p99(alone),
        "batch_tokens": world.num_tokens["jobs"],
        "interactive_tokens": sum(n for t, n in world.num_tokens.items() if t != "jobs"),
        "target": 1.1,
    }


def overload(full: float, seconds: float, policy: str) -> dict[str, float]:
    seconds = max(seconds, 2.5 * TARGET_S)  # the queue grows by a second in each
    clients = [c for i in range(4) for c in poisson(f"t{i}", 2 * full / 4, seconds, i)]
    World(clients, patient=True, policy=policy).run(3 * seconds + 130)
    told = [c for c in clients if c.refusals and c.refusals[0] <= 120]
    again = sum(len(c.refusals) > 1 for c in told)
    waits = sorted(c.ttft for c in clients if c.first >= 0 and not c.refusals)
    return {
        "refused": len(told),
        "admitted_at_the_time_told": 1 - again / max(1, len(told)),
        "longest_told_s": max((c.refusals[0] for c in told), default=0.0),
        "longest_wait_of_those_let_in_s": max(waits),
        "target": 0.9,
    }


def real(told: argparse.Namespace) -> dict[str, Any]:
    """Flood and backlog on this machine, nothing between the arrivals and the engine's inbox."""
    from workers.engine.device.runner import ModelRunner, RunnerSettings

    runner = ModelRunner(RunnerSettings(told.model, device="cpu", num_blocks=NUM_BLOCKS // 2, max_model_len=2048))

    def arrivals(tenant: str, rate: float, until: float, seed: int, since: float = 0.0, **lens: Any) -> list[Client]:
        fixed = {
            "prompt": (told.input_tokens, told.input_tokens),
            "output": (told.output_tokens, told.output_tokens),
            "root": runner.root,
            "sampling": SamplingParams(seed=0, temperature=0.0, ignore_eos=True),
        }
        return poisson(tenant, rate, until, seed, since=since, **{**fixed, **lens})

    def run(clients: list[Client], until: float) -> World:
        gc.collect()
        gc.freeze()  # as a worker does: what is there already is not gone through while steps run
        return World(clients, device=Real(runner)).run(until)

    run(arrivals("warm", 400, 5.0, 0), 5.0)
    measured = arrivals("load", 400, 10.0, 1)
    run(measured, 10.0)
    full = sum(client.ended > 5.0 for client in measured) / 5.0
    rate = 0.1 * full / 2
    seconds = 2 + told.requests / rate
    alone, among = (arrivals("victim", rate, seconds, 2, since=2.0) for _ in range(2))
    run(alone, seconds + 5)
    run(among + arrivals("flood", 10 * full, seconds, 3), seconds + 5)
    times = [percentiles(clients) for clients in (alone, among)]
    ratio = {name: times[1][name] / times[0][name] for name in times[0]}
    print("flood", full, times, ratio, file=sys.stderr)
    lens = told.input_tokens, told.output_tokens
    shapes = [lens, (2 * lens[0], lens[1]), (lens[0], 2 * lens[1]), (lens[0] // 2, lens[1])]
    equals = [
        client
        for number, (prompt, output) in enumerate(shapes)
        for client in arrivals(
            f"equal{number}", 2 * full, told.seconds, number, prompt=(prompt, prompt), output=(output, output)
        )
    ]
    run(equals, told.seconds)
    return {
        "capacity_requests_per_s": full,
        "tokens": lens,
        "flood": {"alone_s": times[0], "flood_s": times[1], "ratio": ratio, "requests": len(among), "target": 1.5},
        "backlog": jain_of(equals) | {"target": 0.95},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="simulated, per scenario")
    parser.add_argument("--only", default="", help="one scenario")
    parser.add_argument("--policy", choices=("fair", "fcfs"), default="fair", help="of the simulated engine")
    parser.add_argument("--http", type=Path, metavar="READY_FILE", help="of a running server")
    parser.add_argument("--model", metavar="DIRECTORY", help="runs it here, in real time")
    parser.add_argument("--requests", type=int, default=110, help="of the victim, with --http and --model")
    parser.add_argument("--input-tokens", type=int, default=256, help="of a request, with --http and --model")
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--clients", type=int, default=96, help="of each backlogged tenant, with --http")
    told = parser.parse_args()
    if told.http is not None:
        ready = json.loads(told.http.read_text())
        lens = told.input_tokens, told.output_tokens
        figures = both(ready, told.seconds, told.requests, told.only, lens, told.clients)
        print(json.dumps(asyncio.run(figures), indent=2))
        return
    if told.model is not None:
        print(json.dumps(real(told), indent=2))
        return
    full = capacity()
    figures: dict[str, object] = {"pace": PACE, "policy": told.policy, "capacity_requests_per_s": full}
    for scenario in (flood, slow, backlog, batch, overload):
        if told.only in ("", scenario.__name__):
            figures[scenario.__name__] = scenario(full, told.seconds, told.policy)
            print(scenario.__name__, figures[scenario.__name__], file=sys.stderr)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
