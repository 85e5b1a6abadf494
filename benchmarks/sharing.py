"""This measures what choices of one request save by sharing blocks, and how full blocks are, with the real engine and the
demo model.

    python benchmarks/sharing.py [--quick] [--json FILE]

Lengths are drawn from lognormal distributions with the means that the PagedAttention paper (Kwon et al., SOSP 2023,
section 6.1) gives for its traces: Alpaca 19.31 tokens in and 58.45 out, ShareGPT 161.31 in and 337.99 out; the spread
is ours (sigma 0.7 in, 0.9 out). Prompts are held-out text; every text has its drawn length. So many requests run at a
time, a new one for each that ends, and every step between the first that ended and the last that began is looked at.
Saving: 1 - blocks held / blocks without sharing, both summed over steps, as in the paper's figure 15, which names for
2, 4 and 6 choices 6.1 - 9.8 % (samples) and 37.6 - 55.2 % (beams) on Alpaca, 16.2 - 30.5 % and 44.3 - 66.3 % on
ShareGPT. Utilisation: slots with a token / slots in the tables of running sequences (its figure 2: 96.3 %).
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist

DEMO_MODEL = Path(__file__).resolve().parents[1] / "ops/demo_model"
sys.path.insert(0, str(DEMO_MODEL))

import data  # of the demo model, which is not a package of the project
from tokenizers import Tokenizer

from cache.prefix_cache import PrefixCache
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.engine import Engine
from workers.engine.reports.occupancy import occupancy
from workers.engine.scheduling.step_plan import Limits
from workers.protocol.messages import BeamParams, GenerateRequest, Region, SamplingParams

BOS = 1
SIGMA_IN, SIGMA_OUT = 0.7, 0.9
MAX_IN, MAX_OUT = 600, 1200


@dataclass(frozen=True)
class Trace:
    name: str
    mean_in: float
    mean_out: float
    num_requests: int


TRACES = (Trace("alpaca", 19.31, 58.45, 64), Trace("sharegpt", 161.31, 337.99, 16))


@dataclass
class Row:
    trace: str
    mode: str
    num_choices: int
    block_size: int
    num_requests: int
    mean_in: float
    """The mean of the sample, in tokens."""
    mean_out: float
    num_steps: int
    """The number of steps that were looked at."""
    saving: float
    utilisation: float
    seconds: float


def lengths(number: int, mean: float, sigma: float, most: int, source: random.Random) -> list[int]:
    """Returns evenly spaced quantiles of a lognormal distribution in random order, rounded, cut at both ends."""
    normal = NormalDist(math.log(mean) - sigma**2 / 2, sigma)
    values = [math.exp(normal.inv_cdf((i + 0.5) / number)) for i in range(number)]
    source.shuffle(values)
    return [min(most, max(1, round(value))) for value in values]


def text() -> list[int]:
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "model/tokenizer.json"))
    ids: list[int] = []
    for document in (doc.text for doc in data.documents() if doc.held_out):
        ids += tokenizer.encode(document).ids
    return ids


def requests(
    trace: Trace, mode: str, num_choices: int, root: str, ids: list[int], scale: float
) -> list[GenerateRequest]:
    """The same prompts and lengths in each mode."""
    source = random.Random(7)
    count = max(12, int(trace.num_requests * scale))
    ins = lengths(count, trace.mean_in, SIGMA_IN, MAX_IN, source)
    outs = lengths(count, trace.mean_out, SIGMA_OUT, MAX_OUT, source)
    made = []
    for number, (num_in, num_out) in enumerate(zip(ins, outs, strict=True)):
        first = source.randrange(len(ids) - num_in)
        made.append(
            GenerateRequest(
                f"r{number}",
                "t",
                "m",
                root,
                (Region(bytes(16)),),
                (BOS, *ids[first : first + num_in - 1]),
                SamplingParams(seed=number, ignore_eos=True),
                num_out,
                lease_bound=num_out * num_choices,
                num_choices=num_choices,
                beams=BeamParams() if mode == "beam" else None,
            )
        )
    return made


def measure(
    runner: ModelRunner, trace: Trace, mode: str, num_choices: int, ids: list[int], told: argparse.Namespace
) -> Row:
    cache = PrefixCache(runner.num_blocks, runner.block_size)
    engine = Engine(runner, cache, Limits(512, 256, runner.max_model_len, ttft_s=1e6))
    asked = requests(trace, mode, num_choices, runner.root, ids, told.scale)
    waiting = [(1, request) for request in asked]
    num_steps = num_held = num_unshared = num_slots = num_used = 0
    begun, num_ended = time.perf_counter(), 0
    shared_mode = "beam" if mode == "beam" else "parallel"
    while waiting or engine.attempts:
        free = told.concurrency - len(engine.attempts)
        events, waiting = waiting[:free], waiting[free:]
        num_ended += len(engine.step(events).ended)
        if not num_ended or not waiting:
            continue
        found = occupancy(engine.scheduler.all_running, runner.block_size, engine.scheduler.layout.num_dropped)
        num_steps += 1
        num_held += found.shared[shared_mode].num_held
        num_unshared += found.shared[shared_mode].num_unshared
        num_slots += found.num_slots
        num_used += found.num_used
    assert engine.totals.num_preempted == 0, "the pool is too small for a steady load"
    return Row(
        trace.name,
        mode,
        num_choices,
        runner.block_size,
        len(asked),
        sum(len(r.prompt) for r in asked) / len(asked),
        sum(r.max_tokens for r in asked) / len(asked),
        num_steps,
        1 - num_held / num_unshared if num_unshared else 0.0,
        num_used / num_slots,
        time.perf_counter() - begun,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(DEMO_MODEL / "model"))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8, help="requests at a time")
    parser.add_argument("--choices", type=int, nargs="+", default=[4])
    parser.add_argument("--traces", nargs="+", default=[trace.name for trace in TRACES])
    parser.add_argument("--modes", nargs="+", default=["single", "parallel", "beam"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests")
    parser.add_argument("--json", type=Path, help="rows that are there already are kept")
    told = parser.parse_args()
    told.scale = 0.2 if told.quick else 1.0
    ids = text()
    runner = ModelRunner(
        RunnerSettings(
            told.model,
            device="cpu",
            dtype="float32",
            block_size=told.block_size,
            num_blocks=131072 // told.block_size,
            max_model_len=2048,
            num_threads=told.threads,
        )
    )
    rows: list[Row] = []
    if told.json is not None and told.json.exists():
        rows = [Row(**row) for row in json.loads(told.json.read_text())["rows"]]
    print("| trace | mode | choices | in | out | saving | utilisation | steps |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    cases = [("single", 1)] + [(mode, n) for mode in ("parallel", "beam") for n in told.choices]
    for mode, number in (case for case in cases if case[0] in told.modes):
        for trace in (trace for trace in TRACES if trace.name in told.traces):
            row = measure(runner, trace, mode, number, ids, told)
            rows.append(row)
            print(
                f"| {row.trace} | {mode} | {number} | {row.mean_in:.1f} | {row.mean_out:.1f} "
                f"| {row.saving:.1%} | {row.utilisation:.1%} | {row.num_steps} |",
                flush=True,
            )
            if told.json is not None:
                told.json.write_text(json.dumps(written(rows, told), indent=1) + "\n")


def written(rows: list[Row], told: argparse.Namespace) -> dict[str, object]:
    machine = {"python": platform.python_version(), "machine": platform.machine()}
    sigmas = {"sigma_in": SIGMA_IN, "sigma_out": SIGMA_OUT}
    return {
        "machine": machine,
        "model": "demo model" if Path(told.model).is_relative_to(DEMO_MODEL) else told.model,
        "concurrency": told.concurrency,
        **sigmas,
        "rows": [asdict(row) for row in rows],
    }


if __name__ == "__main__":
    main()
