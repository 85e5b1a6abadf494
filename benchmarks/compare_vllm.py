"""Headgate against vLLM's CPU build over HTTP: the same model, client and workloads, one server at a time, in rounds.

The model is a random-weight Llama of 96M parameters in bfloat16 (run.py's tokenizer). Workloads: 32 users who share a
1,024-token prefix at 8 streams; 32 different 512-token prompts at 8 streams; one stream of 128 in and 128 out; Poisson
arrivals. Ratios are above 1 where Headgate is better: output tokens/s, and for Poisson the medians of time to first
token and time between tokens. The share of stolen CPU time is noted beside each figure: on a shared host it bounds
what a figure is worth. With --quick everything is shorter. Never part of a test run.

    python benchmarks/compare_vllm.py --vllm-python /path/to/vllm/venv/bin/python --rounds 2
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
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import run
import serve
import torch
from transformers import LlamaConfig, LlamaForCausalLM

START_S = 600
PATIENCE = {"HEADGATE_ENGINE_TTFT_TARGET_MS": "600000"}
"""vLLM queues without end; a worker that refuses what would wait too long would be compared on fewer requests."""
NAME = "bench-llama-96m"
MAX_LEN = 4096
VOCAB = 8192


def make_model(directory: Path) -> int:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=768, intermediate_size=2560, num_hidden_layers=12,
        num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=MAX_LEN,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(run.ROOT / "ops/demo_model/model" / name, directory / name)
    (directory / "generation_config.json").unlink()
    run.write_tokenizer(directory / "tokenizer.json", VOCAB)
    return sum(p.numel() for p in model.parameters())


@contextlib.contextmanager
def headgate(model: Path, home: Path, threads: int) -> Iterator[dict[str, Any]]:
    home.mkdir()
    os.environ.update(PATIENCE)
    with run.headgate_up(home, model, "bfloat16", threads) as ready:
        yield {
            "base_url": ready["base_url"] + "/v1",
            "api_key": ready["api_key"],
            "model": ready["model"],
        }


@contextlib.contextmanager
def vllm(python: Path, model: Path, log: Path) -> Iterator[dict[str, Any]]:
    """Stopped by its process group: it is several processes."""
    port = free_port()
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", NAME,
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--enable-prefix-caching",
        "--max-model-len", str(MAX_LEN),
    ]  # fmt: skip
    env = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=out, process_group=0, cwd=log.parent
        )
    base_url = f"http://127.0.0.1:{port}/v1"
    try:
        wait_for(f"{base_url}/models", process, log)
        yield {"base_url": base_url, "api_key": "none", "model": NAME}
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text()[-3000:]) from None
            time.sleep(0.5)


def workloads(quick: bool, rate: float) -> dict[str, dict[str, Any]]:
    users, out = (8, 16) if quick else (32, 64)
    eight = {"num_requests": users, "concurrency": 8, "output_tokens": out}
    return {
        "one stream, 128 in, 128 out": {
            "num_requests": 1 if quick else 3, "concurrency": 1, "input_tokens": 128,
            "output_tokens": 32 if quick else 128,
        },
        "8 streams, 1,024 shared + 64": {
            **eight, "input_tokens": 64, "prefix_tokens": 1024, "workload": "shared",
        },
        "8 streams, 512 distinct": {**eight, "input_tokens": 512},
        "Poisson, 128 in": {
            "num_requests": 8 if quick else 24, "rate": rate, "input_tokens": 128, "output_tokens": out,
        },
    }  # fmt: skip


def drive(server: dict[str, Any], seed: int, quick: bool, rate: float) -> dict[str, dict[str, Any]]:
    """Seeds differ from round to round: no prompt is cached from the one before."""

    def once(**load: Any) -> dict[str, Any]:
        return asyncio.run(serve.run(serve.Load(**server, vocab_size=VOCAB, **load)))

    once(num_requests=1, concurrency=1, input_tokens=32, output_tokens=8, seed=seed + 90)
    found = {}
    for number, (name, load) in enumerate(workloads(quick, rate).items()):
        before = cpu_times()
        result = once(**load, seed=seed + number)
        if result["num_errors"]:
            raise RuntimeError(f"{name}: {result['errors']}")
        result["stolen"] = stolen_share(before, cpu_times())
        found[name] = result
        print(
            f"  {name}: {result['output_tokens_per_s']} tokens/s, first {result['ttft_ms']['p50']} ms, between"
            f" {result['inter_token_ms']['p50']} ms, stolen {result['stolen']}",
            flush=True,
        )
    return found


def cpu_times() -> list[int]:
    return [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]


def stolen_share(before: list[int], after: list[int]) -> float:
    passed = [b - a for a, b in zip(before, after, strict=True)]
    return round(passed[7] / max(1, sum(passed)), 3)


def figures(result: dict[str, Any]) -> dict[str, float]:
    if result["load"]["rate"] > 0:
        return {
            "ttft_ms": result["ttft_ms"]["p50"],
            "inter_token_ms": result["inter_token_ms"]["p50"],
        }
    return {"output_tokens_per_s": result["output_tokens_per_s"]}


def ratios(rounds: dict[str, list[dict[str, dict[str, Any]]]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds; above 1 Headgate is better."""
    found: dict[str, dict[str, float]] = {}
    for name in rounds["headgate"][0]:
        found[name] = {}
        for figure in figures(rounds["headgate"][0][name]):
            ours, theirs = (
                statistics.median(figures(each[name])[figure] for each in rounds[server])
                for server in ("headgate", "vllm")
            )
            better = ours / theirs if figure.endswith("per_s") else theirs / ours
            found[name] |= {
                f"headgate {figure}": ours,
                f"vllm {figure}": theirs,
                f"ratio of {figure}": round(better, 2),
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--vllm-python", type=Path, required=True, help="interpreter of a venv that has vllm"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rate", type=float, default=0.5, help="Poisson arrivals per second")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    parser.add_argument(
        "--output", type=Path, help="of the JSON (default: benchmarks/results/DATE-vllm-cpu.json)"
    )
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, Any]]] = {"headgate": [], "vllm": []}
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        model = home / NAME
        num_parameters = make_model(model)
        for number in range(options.rounds):
            servers = {
                "headgate": headgate(model, home / f"headgate-{number}", options.threads),
                "vllm": vllm(options.vllm_python, model, home / "vllm.log"),
            }
            for name, context in servers.items():
                print(f"round {number + 1}, {name}", flush=True)
                with context as server:
                    rounds[name].append(drive(server, 100 * number, options.quick, options.rate))
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    machine = {
        "cores": os.cpu_count(), "cpu": cpu_name(), "threads": options.threads, "torch": torch.__version__,
        "python": platform.python_version(), "date": date,
    }  # fmt: skip
    report = {
        "command": " ".join(["benchmarks/compare_vllm.py", *sys.argv[1:]]),
        "machine": machine,
        "num_parameters": num_parameters,
        "ratios": ratios(rounds),
        "rounds": rounds,
    }
    output = options.output or run.ROOT / f"benchmarks/results/{date}-vllm-cpu.json"
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report["ratios"], indent=2))


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


if __name__ == "__main__":
    main()
