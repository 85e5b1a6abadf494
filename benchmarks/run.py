"""`make bench`: serve.py against a fresh `headgate up` of a 100M-parameter random-weight Llama; table and JSON.

Everything that is compared is measured in this one run on this one machine: the read bandwidth of memory (which
gives the floor of a decode step: every weight is read once), one stream, eight streams with and without a shared
1,024-token prefix, and the time a request spends outside the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import serve
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from workers.engine.checkpoint import dtypes

ROOT = Path(__file__).resolve().parent.parent
READ_BYTES = 1 << 30


def make_model(directory: Path) -> dict[str, int]:
    """A random Llama of about 100M parameters with the demo model's tokenizer. Returns its sizes."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(ROOT / "ops/demo_model/model" / name, directory / name)
    (directory / "generation_config.json").unlink()  # it names end tokens of no meaning here
    write_tokenizer(directory / "tokenizer.json", config.vocab_size)
    return {"num_parameters": sum(p.numel() for p in model.parameters())}


def write_tokenizer(path: Path, vocab_size: int) -> None:
    """The demo tokenizer with made-up words up to `vocab_size`, so that every id of the model is some text."""
    tokenizer = json.loads((ROOT / "ops/demo_model/model/tokenizer.json").read_bytes())
    vocab = tokenizer["model"]["vocab"]
    taken = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab.update({f"\u0120word{i}": i for i in range(vocab_size) if i not in taken})
    path.write_text(json.dumps(tokenizer))


def read_bandwidth(threads: int) -> float:
    """Bytes/s of a sum over 1 GiB of float32, the best of five: no decode step can read its weights faster."""
    torch.set_num_threads(threads)
    values = torch.ones(READ_BYTES // 4)
    values.sum()
    return READ_BYTES / min(timed(values.sum) for _ in range(5))


def timed(work: Any) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@contextlib.contextmanager
def headgate_up(home: Path, model: Path, dtype: str, threads: int) -> Iterator[dict[str, Any]]:
    """A server of our own, stopped by its pid at the end."""
    ready_file = home / "ready.json"
    env = {**os.environ, "HEADGATE_ENGINE_DTYPE": dtype, "HEADGATE_THREADS": str(threads)}
    command = [
        str(Path(sys.executable).parent / "headgate"),
        "up",
        "--home",
        str(home / "state"),
        "--port",
        "0",
        "--model",
        str(model),
        "--ready-file",
        str(ready_file),
    ]
    with (home / "up.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 300
        while not ready_file.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((home / "up.log").read_text()[-2000:])
            time.sleep(0.1)
        yield json.loads(ready_file.read_text())
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def scenarios(ready: dict[str, Any], quick: bool) -> dict[str, dict[str, Any]]:
    """Each from a cold prefix: seeds differ."""
    common = {
        "base_url": ready["base_url"] + "/v1",
        "api_key": ready["api_key"],
        "model": ready["model"],
        "vocab_size": 32_000,
    }
    output = 16 if quick else 64

    def load(**more: Any) -> dict[str, Any]:
        return asyncio.run(serve.run(serve.Load(**common, output_tokens=output, **more)))

    eight = {"num_requests": 8 if quick else 24, "concurrency": 8, "input_tokens": 64}
    load(num_requests=2, concurrency=1, input_tokens=32, seed=99)
    return {
        "1 stream": load(num_requests=2 if quick else 6, concurrency=1, input_tokens=64, seed=1),
        "8 streams": load(**eight, seed=2),
        "8 streams, 1,024 + 64 tokens, nothing shared": load(**eight, prefix_tokens=1024, seed=3),
        "8 streams, 1,024 tokens shared + 64": load(**eight, prefix_tokens=1024, workload="shared", seed=4),
    }


def summarise(runs: dict[str, dict[str, Any]], floor_s: float) -> dict[str, Any]:
    one = runs["1 stream"]
    shared = runs["8 streams, 1,024 tokens shared + 64"]
    apart = runs["8 streams, 1,024 + 64 tokens, nothing shared"]
    step_s = one["time_per_output_token_ms"]["p50"] / 1000
    return {
        "decode_floor_ms": round(floor_s * 1000, 3),
        "decode_ms_1_stream": round(step_s * 1000, 3),
        "decode_share_of_floor": round(floor_s / step_s, 3),
        "shared_prefix_speedup": round(shared["output_tokens_per_s"] / apart["output_tokens_per_s"], 2),
        "outside_engine_ms_p50": one["outside_engine_ms"] and one["outside_engine_ms"]["p50"],
    }


def table(runs: dict[str, dict[str, Any]]) -> str:
    rows = [
        "| scenario | output tok/s | TTFT p50 ms | between tokens p50 ms | cached tokens | errors |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, run in runs.items():
        rows.append(
            f"| {name} | {run['output_tokens_per_s']} | {run['ttft_ms']['p50']} | {run['inter_token_ms']['p50']} "
            f"| {run['cached_tokens']} of {run['prompt_tokens']} | {run['num_errors']} |"
        )
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quick", action="store_true", help="a smoke run: fewer and shorter requests")
    parser.add_argument("--output", type=Path, help="directory of the JSON and the table (default: benchmarks/results)")
    arguments = parser.parse_args()
    output = arguments.output or ROOT / "benchmarks/results"
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        sizes = make_model(home / "bench-llama-100m")
        bandwidth = read_bandwidth(arguments.threads)
        config = AutoConfig.from_pretrained(home / "bench-llama-100m")
        chosen = dtypes.of_model(arguments.dtype, torch.device("cpu"), config)
        num_bytes = sizes["num_parameters"] * chosen.dtype.itemsize
        with headgate_up(home, home / "bench-llama-100m", arguments.dtype, arguments.threads) as ready:
            runs = scenarios(ready, arguments.quick)
    summary = {**sizes, "read_bandwidth_gb_per_s": round(bandwidth / 1e9, 2), **summarise(runs, num_bytes / bandwidth)}
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "dtype": chosen.name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date,
    }
    result = {"command": "make bench", "machine": machine, "summary": summary, "runs": runs}
    text = f"{table(runs)}\n\n{json.dumps(summary, indent=2)}\n"
    (output / f"{date}-cpu.json").write_text(json.dumps(result, indent=2) + "\n")
    (output / f"{date}-cpu.md").write_text(text)  # the table for people; nothing in the repository reads it
    print(text)


if __name__ == "__main__":
    main()
