"""Steps of a CPU worker without HTTP: decode and prefill of random weights, as ratios to reading the weights once.

The floor of a decode step is the time in which this machine, with the same threads, reads as many bytes as the step's
weights have. A read is timed before each step, because the memory's speed can change by half within a second where a
host is shared; a ratio is the median of those pairs. `--profile` adds where the time of a step goes, by operation. `--unfused`
runs each model a second time with transformers' layers as they are, step by step beside the first: the ratio is what
fusing gains (1 for models whose layers are hand-written: `workers/engine/model/layer_kinds.py`). `--uncompiled` does
the same with layers as they are where nothing is compiled but products, and says the processor time of a step of each,
which other programs on the machine change less than the time by the clock.

    python benchmarks/cpu_steps.py --shape llama95m qwen3-0.6b --rows 1 8 --context 256
    python benchmarks/cpu_steps.py --shape granite --unfused
    python benchmarks/cpu_steps.py --shape gpt2 gpt-neox phi --uncompiled --threads 1
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MixtralConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from workers.engine.device.runner import ModelRunner, RunnerSettings
from workers.engine.layers import moe
from workers.engine.model import compiled_rows, llama
from workers.engine.values.plan import Row, SampleSpec
from workers.protocol.messages import SamplingParams

READ_BYTES = 1 << 29
GREEDY = SamplingParams(seed=0, temperature=0.0)


def shapes() -> dict[str, PretrainedConfig]:
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    size = {
        "vocab_size": 8192,
        "hidden_size": 768,
        "intermediate_size": 2560,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
    }
    return {
        "llama95m": LlamaConfig(**size, max_position_embeddings=4096, tie_word_embeddings=True, **ends),
        "qwen3-0.6b": Qwen3Config(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            **ends,
        ),
        "gpt2": GPT2Config(**ends),
        "gpt-neox": GPTNeoXConfig(
            **size | {"intermediate_size": 3072}, max_position_embeddings=2048, tie_word_embeddings=False, **ends
        ),
        "phi": PhiConfig(
            **size | {"intermediate_size": 3072}, max_position_embeddings=2048, tie_word_embeddings=False, **ends
        ),
        "gemma2": Gemma2Config(**size, head_dim=64, max_position_embeddings=4096, **ends),
        "gemma3": Gemma3TextConfig(**size, head_dim=64, max_position_embeddings=4096, **ends),
        "phi3": Phi3Config(
            **size, max_position_embeddings=4096, sliding_window=2047, tie_word_embeddings=True, pad_token_id=0, **ends
        ),
        "mixtral": MixtralConfig(
            **size | {"num_hidden_layers": 6, "intermediate_size": 1536},
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=4096,
            **ends,
        ),
        "qwen3-moe": Qwen3MoeConfig(
            **size | {"num_hidden_layers": 6},
            head_dim=64,
            moe_intermediate_size=384,
            num_experts=32,
            num_experts_per_tok=4,
            norm_topk_prob=True,
            max_position_embeddings=4096,
            **ends,
        ),
        "granite": GraniteConfig(**size, max_position_embeddings=4096, tie_word_embeddings=True, **ends),
    }


def build(name: str, dtype: str, threads: int, fuse: bool = True) -> ModelRunner:
    with tempfile.TemporaryDirectory() as directory:
        config = shapes()[name]
        config.dtype = torch.bfloat16  # as checkpoints are stored
        config.save_pretrained(directory)
        settings = RunnerSettings(
            directory, device="cpu", dtype=dtype, num_threads=threads, num_blocks=1024, random_weights=True, fuse=fuse
        )
        return ModelRunner(settings)


def weights_read(name: str, itemsize: int, num_rows: int) -> int:
    """Bytes of a decode step: every weight but the input embedding, which the head has again. Of experts it is the share
    that so many rows would choose by chance."""
    config = shapes()[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    used = 1.0 - (1.0 - getattr(config, "num_experts_per_tok", 1) / experts) ** num_rows
    sizes = [p.numel() * (used if ".experts." in of else 1.0) for of, p in model.named_parameters()]
    return int(sum(sizes) * itemsize)


class Floor:
    def __init__(self, num_bytes: int) -> None:
        self._values, self._share = torch.ones(READ_BYTES // 4), num_bytes / READ_BYTES

    def __call__(self) -> float:
        """Seconds in which so many bytes are read now."""
        return self._share * seconds(self._values.sum)


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


class Case:
    """Some rows with a context that is there already, one token more in each step."""

    def __init__(self, runner: ModelRunner, num_rows: int, context: int) -> None:
        self.runner = runner
        self.num_rows, self.context = num_rows, context
        self.blocks = -(-(context + 256) // runner.block_size)

    def _row(self, row: int, tokens: Sequence[int], start: int) -> Row:
        first = 1 + row * self.blocks
        table = list(range(first, first + self.blocks))
        draw = SampleSpec(GREEDY, row, start + len(tokens), [], [])
        return Row(tokens, start, table, (draw,))

    def prefill(self) -> float:
        tokens = [(7 * place) % 8000 for place in range(self.context)]
        return sum(
            seconds(lambda row=row: self.runner.execute([self._row(row, tokens, 0)])) for row in range(self.num_rows)
        )

    def steps(self, number: int, clock: Callable[[], float] = time.perf_counter) -> Iterator[float]:
        """Seconds of each."""
        last = [1] * self.num_rows
        for step in range(number):
            rows = [self._row(r, [last[r]], self.context + step) for r in range(self.num_rows)]
            started = clock()
            results = self.runner.execute(rows)
            yield clock() - started
            last = [result.drawn[0].token for result in results]


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    runner = build(name, options.dtype, options.threads)
    dtype = runner.loaded.model.dtype
    report: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
    for num_rows in options.rows:
        case, floor = Case(runner, num_rows, options.context), Floor(weights_read(name, dtype.itemsize, num_rows))
        prefill = min(case.prefill() for _ in range(2))
        pairs = [(floor(), step) for step in case.steps(options.steps)]
        floors, steps = zip(*pairs, strict=True)
        report[f"{num_rows} rows"] = {
            "prefill_tokens_per_s": round(num_rows * options.context / prefill),
            "decode_ms": round(1000 * statistics.median(steps), 3),
            "decode_best_ms": round(1000 * min(steps), 3),
            "floor_ms": round(1000 * statistics.median(floors), 3),
            "to_floor": round(statistics.median(step / read for read, step in pairs), 3),
        }
        if options.profile:
            profile(case)
    if options.uncompiled:
        report["uncompiled"] = processor_times(name, runner, options)
    if options.unfused:
        report["unfused_to_fused"] = gains(name, runner, options)
    return report


def gains(name: str, fused: ModelRunner, options: argparse.Namespace) -> dict[str, float]:
    """Returns the median time of a decode step unfused, over that of a fused one; one of each in turn, so that both see
    the same machine."""
    plain = build(name, options.dtype, options.threads, fuse=False)
    found = {}
    for num_rows in options.rows:
        cases = [Case(runner, num_rows, options.context) for runner in (plain, fused)]
        for case in cases:
            case.prefill()
        pairs = list(zip(*(case.steps(options.steps) for case in cases), strict=True))
        before, after = (statistics.median(times) for times in zip(*pairs, strict=True))
        found[f"{num_rows} rows"] = round(before / after, 3)
    return found


def processor_times(name: str, compiled: ModelRunner, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Returns the median processor time of all threads in a decode step, and the least one of a prompt, without
    compiled layers and with them; one of each in turn."""
    with (
        mock.patch.object(llama, "MORE_KINDS", {}),
        mock.patch.object(compiled_rows, "build", return_value=None),
        mock.patch.object(moe, "has_panels", return_value=False),
    ):
        plain = build(name, options.dtype, options.threads)
    found = {}
    for num_rows in options.rows:
        cases = [Case(runner, num_rows, options.context) for runner in (plain, compiled)]
        prompts = [[processor_seconds(case.prefill) for case in cases] for _ in range(4)]
        pairs = list(zip(*(case.steps(options.steps, time.process_time) for case in cases), strict=True))
        before, after = (1000 * statistics.median(times) for times in zip(*pairs, strict=True))
        prompt_before, prompt_after = (1000 * min(times) for times in zip(*prompts, strict=True))
        found[f"{num_rows} rows"] = {
            "step_before_ms": round(before, 2),
            "step_after_ms": round(after, 2),
            "step_ratio": round(before / after, 2),
            "prompts_before_ms": round(prompt_before, 1),
            "prompts_after_ms": round(prompt_after, 1),
            "prompts_ratio": round(prompt_before / prompt_after, 2),
        }
    return found


def processor_seconds(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


def profile(case: Case) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        list(case.steps(20))
    print(found.key_averages().table(sort_by="self_cpu_time_total", row_limit=25), file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=tuple(shapes()), default=["llama95m"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--profile", action="store_true", help="operations of a step, to stderr")
    parser.add_argument("--unfused", action="store_true", help="what fusing gains, as a ratio")
    parser.add_argument("--uncompiled", action="store_true", help="what compiled layers gain, in processor time")
    parser.add_argument("--json", type=Path, help="also write the report there")
    options = parser.parse_args()
    report = {name: measure(name, options) for name in options.shape}
    text = json.dumps({"threads": options.threads, **report}, indent=2)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
