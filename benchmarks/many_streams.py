"""Hundreds of streams of one tenant at once on this CPU, and a request of another that comes among them.

Streams take turns where a step has no time for all of them (`workers/engine/queueing/turns.py`). Each round runs both ways one after
the other, with turns and with all streams in each step, in another order each time. Decode steps are those without prompts. Random weights: only times count.

    python benchmarks/many_streams.py --shape qwen3-0.6b --streams 192
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

import itertools

import torch
from cpu_steps import build, shapes
from fakes import generate_request, scripted_engine

from workers.engine.device.runner import ModelRunner
from workers.protocol.messages import SamplingParams, StepFrame

SAMPLING = SamplingParams(seed=0, temperature=0.0, ignore_eos=True)
NUM_PROMPT, NUM_NEWCOMER = 16, 8


def play(runner: ModelRunner, options: argparse.Namespace, *, turns: bool) -> dict[str, Any]:
    engine = scripted_engine(runner, max_batch_tokens=512, max_running=256, clock=time.perf_counter)
    if not turns:
        engine.scheduler.budget.num_rows = lambda num_kv_tokens: 10**9  # type: ignore[method-assign]  # the law that is measured is off

    def request(name: str, tenant: str, number: int, num_output: int) -> Any:
        prompt = [100 + number, *range(3, 2 + NUM_PROMPT)]
        return generate_request(
            name, prompt, num_output, tenant=tenant, sampling=SAMPLING, root=runner.root, cache_read=False
        )

    told: dict[str, list[float]] = defaultdict(list)
    steps: list[tuple[int, float]] = []

    def step(*messages: Any) -> None:
        out = engine.step([(1, message) for message in messages])
        now = time.perf_counter()
        steps.extend((s.num_decode_seqs, s.execute_s) for s in out.steps if not s.num_prefill_tokens)
        for _, message in out.messages:
            for delta in message.deltas if isinstance(message, StepFrame) else ():
                told[delta.request_id] += [now] * len(delta.tokens)

    for number in range(12):  # steps of some sizes, so that the pace is known
        step(request(f"before{number}", "many", number, 4 + number))
    while engine.attempts:
        step()
    told.clear()
    steps.clear()
    began = time.perf_counter()
    step(*(request(f"s{i}", "many", i, options.tokens) for i in range(options.streams)))
    while len(told) < options.streams:
        step()
    asked = time.perf_counter()
    step(request("newcomer", "one", 5000, NUM_NEWCOMER))
    while len(told["newcomer"]) < NUM_NEWCOMER:
        step()
    mine = told["newcomer"]
    gaps = [after - before for before, after in itertools.pairwise(mine)]
    while engine.attempts:
        step()
    took = time.perf_counter() - began
    times = [seconds for _, seconds in steps]
    return {
        "rows": round(statistics.median(rows for rows, _ in steps)),
        "step_ms": round(1000 * statistics.median(times)),
        "p95_step_ms": round(1000 * statistics.quantiles(times, n=20)[-1]),
        "output_tokens_per_s": round(sum(map(len, told.values())) / took),
        "newcomers_first_token_ms": round(1000 * (mine[0] - asked)),
        "newcomers_token_gap_ms": round(1000 * statistics.median(gaps)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(shapes()), default="llama95m")
    parser.add_argument("--streams", type=int, default=192)
    parser.add_argument("--tokens", type=int, default=24, help="of each stream")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    options.dtype = "auto"
    runner = build(options.shape, options.dtype, options.threads)
    play(runner, argparse.Namespace(streams=options.streams, tokens=4), turns=False)  # compiles
    report: dict[str, list[dict[str, Any]]] = {"turns": [], "all": []}
    for number in range(options.rounds):
        for way in ("turns", "all") if number % 2 else ("all", "turns"):
            report[way].append(play(runner, options, turns=way == "turns"))
    print(json.dumps({"shape": options.shape, "threads": options.threads, **report}, indent=1))


if __name__ == "__main__":
    main()
