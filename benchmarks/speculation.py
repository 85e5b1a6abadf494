"""This measures what proposals gain and cost, with and without them in turns in one process, in tokens per second of the
real engine.

    python benchmarks/speculation.py [--proposer tree] [--model DIRECTORY] [--draft DIRECTORY] [--runs 5]

The demo model by default, float32 on a CPU. Three kinds of text: `copy` asks greedily for what the prompt holds
(copy-heavy), `plain` goes on with held-out text greedily, `random` draws at temperature 1.5, where hardly any guess
can be right. A case runs its prompts `streams` at a time, off and on in turns; a ratio is that of the best run of each
side, by the clock and by the process's own CPU time, which a busy machine disturbs less. The tokens of both sides are
compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

DEMO_MODEL = Path(__file__).resolve().parents[1] / "ops/demo_model"
sys.path.insert(0, str(DEMO_MODEL))

import data  # of the demo model, which is not a package of the project
from tokenizers import Tokenizer

from cache.prefix_cache import PrefixCache
from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.engine import Engine
from workers.engine.scheduling.speculation import Speculation
from workers.engine.scheduling.step_plan import Limits
from workers.engine.speculate.draft import DraftProposer
from workers.engine.speculate.lookahead import LookaheadProposer
from workers.engine.speculate.lookup import NgramProposer
from workers.engine.speculate.proposer import Proposer
from workers.engine.speculate.tree import TreeProposer
from workers.protocol.messages import GenerateRequest, Region, SamplingParams, StepFrame

BOS = 1
NUM_BLOCKS = 2048


@dataclass(frozen=True)
class Case:
    text: str
    num_streams: int
    num_prompts: int
    num_tokens: int = 128

    @property
    def temperature(self) -> float:
        return 1.5 if self.text == "random" else 0.0


@dataclass(frozen=True)
class Run:
    seconds: float
    """Per token, decode alone."""
    cpu_seconds: float
    tokens: dict[str, list[int]]
    num_proposed: int
    num_accepted: int
    num_steps: int


def prompts(text: str, number: int) -> list[list[int]]:
    """`copy`: a piece of source four times over and the beginning of a fifth; else just the piece."""
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "model/tokenizer.json"))
    found = []
    for document in (doc.text for doc in data.documents() if doc.held_out):
        ids = tokenizer.encode(document).ids
        for first in range(64, len(ids) - 160, 700):
            piece = ids[first : first + 160]
            found.append([BOS, *piece * 4, *piece[:20]] if text == "copy" else [BOS, *piece])
            if len(found) == number:
                return found
    raise SystemExit(f"only {len(found)} prompts of {number}")


def run(runner: ModelRunner, draft: ModelRunner | None, case: Case, told: argparse.Namespace, *, on: bool) -> Run:
    cache = PrefixCache(runner.num_blocks, runner.block_size)
    speculation = None
    if on:
        speculation = Speculation(
            _proposer(told.proposer, runner.block_size) if draft is None else DraftProposer(draft),
            cache,
            max_proposals=told.proposals,
            max_step_tokens=told.step_tokens,
        )
    limits = Limits(512, 64, runner.max_model_len)
    engine = Engine(runner, cache, limits, speculation=speculation)
    events = []
    for i, prompt in enumerate(prompts(case.text, case.num_prompts)):
        sampling = SamplingParams(seed=i, temperature=case.temperature, ignore_eos=True)
        region = (Region(bytes(16)),)
        request = GenerateRequest(
            f"r{i}",
            "t",
            "m",
            runner.root,
            region,
            tuple(prompt),
            sampling,
            case.num_tokens,
            lease_bound=case.num_tokens,
        )
        events.append((1, request))
    tokens: dict[str, list[int]] = {f"r{i}": [] for i in range(case.num_prompts)}
    clock = Clock()
    for first in range(0, case.num_prompts, case.num_streams):
        _stream(engine, events[first : first + case.num_streams], tokens, clock)
    totals = engine.totals
    return Run(
        clock.wall / clock.num_tokens,
        clock.cpu / clock.num_tokens,
        tokens,
        totals.num_proposed,
        totals.num_accepted,
        totals.num_steps,
    )


def _proposer(name: str, block_size: int) -> Proposer:
    match name:
        case "tree":
            return TreeProposer(block_size)
        case "lookahead":
            return LookaheadProposer()
        case _:
            return NgramProposer()


@dataclass
class Clock:
    wall: float = 0.0
    cpu: float = 0.0
    num_tokens: int = 0


def _stream(
    engine: Engine, events: list[tuple[int, GenerateRequest]], tokens: dict[str, list[int]], clock: Clock
) -> None:
    """The clock runs from the first token of the last stream on."""
    mine = [tokens[request.request_id] for _, request in events]
    begun = None
    output = engine.step(events)
    while output.num_attempts or output.messages:
        for _, message in output.messages:
            for delta in message.deltas if isinstance(message, StepFrame) else ():
                tokens[delta.request_id] += delta.tokens
        if begun is None and all(mine):
            begun = time.perf_counter(), time.process_time(), sum(map(len, mine))
        output = engine.step()
    assert begun is not None
    clock.wall += time.perf_counter() - begun[0]
    clock.cpu += time.process_time() - begun[1]
    clock.num_tokens += sum(map(len, mine)) - begun[2]


def load(model: str, told: argparse.Namespace) -> ModelRunner:
    return ModelRunner(
        RunnerSettings(
            model,
            device="cpu",
            dtype=told.dtype,
            num_blocks=NUM_BLOCKS,
            steps="plain",
            num_threads=told.threads,
            max_model_len=2048,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(DEMO_MODEL / "model"))
    parser.add_argument("--proposer", choices=["ngram", "tree", "lookahead"], default="ngram")
    parser.add_argument("--draft", help="a draft model's directory, in the place of the proposer")
    parser.add_argument("--texts", nargs="+", default=["copy", "plain", "random"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--proposals", type=int, default=8)
    parser.add_argument("--step-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompts", type=int, default=4, help="at least; else as many as streams")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    told = parser.parse_args()
    runner = load(told.model, told)
    draft = load(told.draft, told) if told.draft else None
    print(f"{told.model} {told.dtype}, {told.threads} threads, best of {told.runs} runs a side\n")
    print("| text | streams | off tok/s | on tok/s | ratio | CPU time | accepted | steps | equal |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for text in told.texts:
        for num_streams in told.streams:
            case = Case(text, num_streams, max(num_streams, told.prompts))
            run(runner, draft, case, told, on=True)
            pairs = [tuple(run(runner, draft, case, told, on=on) for on in (False, True)) for _ in range(told.runs)]
            off, on = (min(side, key=lambda r: r.seconds) for side in zip(*pairs, strict=True))
            cpu = [min(pair[side].cpu_seconds for pair in pairs) for side in (0, 1)]
            same = sum(off.tokens[key] == on.tokens[key] for key in off.tokens)
            share = f"{on.num_accepted}/{on.num_proposed}"
            print(
                f"| {text} | {num_streams} | {1 / off.seconds:.0f} | {1 / on.seconds:.0f} "
                f"| {off.seconds / on.seconds:.2f} | {cpu[0] / cpu[1]:.2f} | {share} "
                f"| {off.num_steps} → {on.num_steps} | {same}/{case.num_prompts} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
