"""Draws what `benchmarks/memory.py` has kept: memory and CPU of every process over the requests of a run.

    pip install matplotlib
    python benchmarks/memory_picture.py benchmarks/results/2026-11-27-soak.json docs/images/soak.svg

Above: private memory at rest after each part of the run. Below: the CPU that each part took, for each request.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.use("Agg")
mpl.rcParams.update({"svg.hashsalt": "headgate", "svg.fonttype": "none", "font.size": 9})


def draw(run: dict[str, Any]) -> Figure:
    part, readings = run["requests_per_part"], run["readings"]
    millions = [number * part / 1e6 for number in range(len(readings))]
    figure = Figure(figsize=(8, 7), layout="constrained")
    memory, cpu = figure.subplots(2, 1, sharex=True)
    for name in readings[0]["processes"]:
        sizes = [reading["processes"][name]["private"] / 1e6 for reading in readings]
        memory.plot(millions, sizes, label=name, linewidth=1.5)
        spent = [reading["cpu_s"][name] for reading in readings]
        per_request = [1000 * (after - before) / part for before, after in itertools.pairwise(spent)]
        cpu.stairs(per_request, millions, baseline=None, label=name, linewidth=1.5)
    _finish(memory, "private memory, MB")
    _finish(cpu, "CPU for each request, ms")
    cpu.set_xlabel("million requests")
    memory.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, 1.18), frameon=False)
    return figure


def _finish(axes: Axes, what: str) -> None:
    axes.set_ylabel(what)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.grid(color="#dddddd")
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="the JSON that memory.py wrote")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    told = parser.parse_args()
    run = json.loads(told.results.read_text())[told.database]
    draw(run).savefig(told.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
