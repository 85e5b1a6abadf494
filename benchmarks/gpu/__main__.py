"""`make bench-gpu`: what the kernels and the engine reach of what this GPU can do, measured in one run.

Needs torch, Triton, transformers and this repository. Writes JSON after every part, so a run that is stopped keeps
what it had. Figures are ratios to two ceilings, a device copy and a bf16 matrix product, both measured in the same run,
first and last. Without a GPU, `--tiny` runs everything small on the CPU: that tests the script, not the speed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import stand_in

stand_in.install()

from benchmarks.gpu import decode_step, kernel_cases, models, roofline, serving, timing

KERNEL_SHARE = 0.45
"""The share of the time that kernels get: they and their peers compile for long, and the models must get their turn."""
PARTS = ("kernels", "decode", "mixed", "shared")
KEYS = {"kernels": ("kernel", "shape"), "decode": ("model", "batch")} | dict.fromkeys(
    ("idle", "mixed", "shared"), ("model",)
)
"""Names of the fields that identify a row of a part: a run that goes on with another one measures no row again."""
CEILINGS = ("ceilings_first", "ceilings_last")
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Run:
    """The whole measurement: its device, its clock, and the record it writes."""

    def __init__(self, told: argparse.Namespace) -> None:
        self.told = told
        self.tiny: bool = told.tiny
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.started = time.monotonic()
        self.record: dict[str, Any] = {"about": about(self.device), "failures": []}
        if told.resume and told.out.exists():
            before = json.loads(told.out.read_text())
            for part in (*KEYS, "load"):
                if rows := [row for row in before.get(part, ()) if "failed" not in row]:
                    self.record[part] = rows
            told_before = before["about"] | {name: before.get(name) for name in CEILINGS}
            self.record["resumed"] = [*before.get("resumed", ()), told_before]
        self.first = self.ceilings("ceilings_first")

    @property
    def left_s(self) -> float:
        return float(self.told.budget_s) - (time.monotonic() - self.started)

    def has(self, part: str, what: dict[str, Any]) -> bool:
        """Says whether a run that this one goes on with has measured this row."""
        return any(all(row[key] == what[key] for key in KEYS[part]) for row in self.record.get(part, ()))

    def ceilings(self, name: str) -> timing.Ceilings:
        found = timing.ceilings(self.device, self.tiny)
        self.record[name] = asdict(found)
        return found

    def add(self, part: str, row: dict[str, Any]) -> None:
        """Prints a row and writes the record."""
        self.record.setdefault(part, []).append(row)
        if "failed" in row:
            self.record["failures"].append(f"{part}: {row}")
        shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items())
        print(f"[{self.left_s:4.0f} s left] {part}: " + ", ".join(shown), flush=True)
        self.told.out.parent.mkdir(parents=True, exist_ok=True)
        self.told.out.write_text(json.dumps(self.record, indent=1) + "\n")

    def attempt(
        self, part: str, what: dict[str, Any], work: Callable[[], dict[str, Any]], reserved_s: float = 0.0
    ) -> None:
        """A row, unless it is there, or the reason why there is none. `reserved_s`: time that belongs to what comes
        later."""
        if self.has(part, what):
            return
        if self.left_s <= reserved_s:
            self.add(part, what | {"failed": "no time left"})
            return
        try:
            self.add(part, what | work())
        except Exception as error:  # noqa: BLE001  # a part that breaks must not cost the others their figures
            self.add(part, what | {"failed": f"{type(error).__name__}: {str(error)[:400]}"})
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> int:
    told = parse()
    run = Run(told)
    if run.device.type != "cuda" and not run.tiny:
        print("There is no CUDA device; --tiny runs everything small on the CPU.", file=sys.stderr)
        return 2
    if "kernels" in told.part:
        alone = told.part == ["kernels"]
        reserved_s = 0.0 if alone else told.budget_s * (1 - KERNEL_SHARE)
        for case in sorted(
            kernel_cases.all_cases(run.tiny, told.kernel), key=lambda case: not case.bar
        ):  # those with a bar first
            run.attempt(
                "kernels",
                {"kernel": case.kernel, "shape": case.shape},
                lambda case=case: kernel_cases.measure(case, run.device, run.first),
                reserved_s=reserved_s,
            )
    with tempfile.TemporaryDirectory() as folder:
        for shape in shapes(told):
            _measure_model(run, shape, Path(folder) / shape.name)
    run.ceilings("ceilings_last")
    run.add("done", {"seconds": time.monotonic() - run.started})
    return 1 if run.record["failures"] else 0


def _measure_model(run: Run, shape: models.Shape, folder: Path) -> None:
    wanted = [part for part in PARTS[1:] if part in run.told.part and not _measured(run, shape, part)]
    if not wanted:
        return
    longest = 48 if run.tiny else 8192
    try:
        started = time.perf_counter()
        runner = models.random_runner(shape, folder, run.device.type, longest, 400 if run.tiny else None)
    except Exception as error:  # noqa: BLE001  # as above
        run.add("load", {"model": shape.name, "failed": f"{type(error).__name__}: {error}"})
        return
    loaded = {"model": shape.name, "num_blocks": runner.num_blocks}
    run.add("load", loaded | {"seconds": time.perf_counter() - started})
    for part, work in (("decode", _decode), ("mixed", _mixed), ("shared", _shared)):
        if part in wanted:
            work(run, shape, runner)


def _batches(run: Run) -> tuple[int, ...]:
    return (1, 3) if run.tiny else BATCHES


def _measured(run: Run, shape: models.Shape, part: str) -> bool:
    """Says whether a model need not be loaded for a part."""
    if part != "decode":
        return run.has(part, {"model": shape.name})
    steps = all(run.has(part, {"model": shape.name, "batch": batch}) for batch in _batches(run))
    return steps and (run.device.type != "cuda" or run.has("idle", {"model": shape.name}))


def _decode(run: Run, shape: models.Shape, runner: Any) -> None:
    context, num_steps = (16, 4) if run.tiny else (1024, 32)
    for batch in _batches(run):
        run.attempt(
            "decode",
            {"model": shape.name, "batch": batch},
            lambda b=batch: decode_step.measure(shape, runner, b, context, num_steps, run.first),
        )
    if run.device.type == "cuda":
        run.attempt("idle", {"model": shape.name}, lambda: decode_step.idle_share(runner, 64, context, num_steps))


def _mixed(run: Run, shape: models.Shape, runner: Any) -> None:
    """nano-vllm's workload: all at once, sampled at temperature 0.6."""
    asks = serving.mixed_workload(6, 20, 5) if run.tiny else serving.mixed_workload(256, 1024)

    def work() -> dict[str, Any]:
        # The first requests compile and warm what is left to warm; they are not in the figures.
        serving.serve(_engine(run, runner), asks[:2], 0.6, cache_read=False)
        served = serving.serve(_engine(run, runner), asks, 0.6, cache_read=False)
        bound = roofline.workload_s(
            shape.served, [len(ask.prompt) for ask in asks], [ask.max_tokens for ask in asks], run.first
        )
        return _row(served) | {"bound_s": bound, "share_of_bound": bound / served.seconds}

    run.attempt("mixed", {"model": shape.name, "num_seqs": len(asks)}, work)


def _shared(run: Run, shape: models.Shape, runner: Any) -> None:
    """Users of one system prompt: the prefix cache on, and off in the same run."""
    sizes = (4, 32, 5, 3) if run.tiny else (64, 4096, 256, 128)
    asks = serving.shared_workload(*sizes, vocab=shape.config["vocab_size"])

    def work() -> dict[str, Any]:
        off = serving.serve(_engine(run, runner), asks, 0.6, cache_read=False)
        engine = _engine(run, runner)
        serving.serve(engine, asks[:1], 0.6, cache_read=True)  # the prompt is registered
        on = serving.serve(engine, asks, 0.6, cache_read=True)
        row = {f"{name}_cached": value for name, value in _row(on).items()}
        return _row(off) | row | {"speedup": off.seconds / on.seconds}

    run.attempt("shared", {"model": shape.name, "num_users": sizes[0], "shared": sizes[1]}, work)


def _engine(run: Run, runner: Any) -> Any:
    return serving.build(runner, *((64, 8) if run.tiny else (8192, 256)))


def _row(served: serving.Served) -> dict[str, Any]:
    row: dict[str, Any] = {
        "seconds": served.seconds,
        "num_output": served.num_output,
        "num_prefill": served.num_prefill,
        "num_cached": served.num_cached,
        "num_steps": served.num_steps,
        "output_per_s": served.output_per_s,
        "median_first_token_s": served.median_first_token_s,
    }
    if served.failures:
        row["failed"] = f"{len(served.failures)} requests, the first: {served.failures[0]}"
    return row


def shapes(told: argparse.Namespace) -> Iterator[models.Shape]:
    if told.tiny:
        yield models.TINY
        return
    yield from (shape for shape in models.SHAPES if told.model in shape.name)


def about(device: torch.device) -> dict[str, Any]:
    import transformers
    import triton

    said = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "commit": _said("git", "rev-parse", "--short", "HEAD"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
        "device": device.type,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        said["gpu"] = properties.name
        said["capability"] = f"{properties.major}.{properties.minor}"
        said["memory_bytes"] = properties.total_memory
        said["cuda"] = torch.version.cuda
        said["driver"] = _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return said


def _said(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make bench-gpu ARGS=…", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any device")
    parser.add_argument("--part", action="append", choices=PARTS, help="only these parts")
    parser.add_argument("--kernel", default="", help="only cases whose name or shape has this text")
    parser.add_argument("--model", default="", help="only models whose name has this text")
    parser.add_argument("--budget-s", type=float, default=570, help="start nothing after this time")
    parser.add_argument("--resume", action="store_true", help="keep the rows that --out has, measure the others")
    parser.add_argument("--out", type=Path, default=Path("bench-gpu.json"))
    told = parser.parse_args()
    told.part = told.part or list(PARTS)
    return told


if __name__ == "__main__":
    sys.exit(main())
