"""`make bench-gpu` small, on the CPU: the script that will run once on a rented GPU must not fail there first."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.serving import mixed_workload

ROOT = Path(__file__).resolve().parents[3]
WITHOUT_MSGSPEC = "import sys, runpy; sys.modules['msgspec'] = None; sys.argv[0] = 'benchmarks.gpu'; runpy.run_module('benchmarks.gpu', run_name='__main__')"


def test_the_stand_in_of_msgspec_declares_every_message():
    code = (
        "import sys; sys.modules['msgspec'] = None; from benchmarks.gpu import stand_in; stand_in.install(); "
        "from workers.protocol.reports import EngineReport; import workers.protocol.messages"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("command", [["-m", "benchmarks.gpu"], ["-c", WITHOUT_MSGSPEC]], ids=["whole", "gpu image"])
def test_every_part_gives_figures_and_nothing_fails(command, tmp_path):
    out = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, *command, "--tiny", "--out", out],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads(out.read_text())
    assert record["failures"] == []
    for row in record["kernels"]:
        assert row["error"] <= row["tolerance"]
        assert row["us"] > 0
    (mixed,), (shared,) = record["mixed"], record["shared"]
    assert mixed["num_output"] == sum(ask.max_tokens for ask in mixed_workload(6, 20, 5))
    assert 0 < mixed["share_of_bound"] < 1
    assert shared["num_cached"] == 0
    assert shared["num_cached_cached"] == 4 * 32
    assert all(row["share_of_floor"] < 1 for row in record["decode"])
    assert math.isclose(
        record["ceilings_first"]["copy_bytes_per_s"], record["ceilings_last"]["copy_bytes_per_s"], rel_tol=20
    )


@pytest.mark.slow
def test_a_run_that_goes_on_keeps_every_part_and_measures_only_what_is_missing(tmp_path):
    """The batch of 3 is missing, and the mixed workload failed."""
    out = tmp_path / "result.json"
    given = {
        "about": {"date": "before"},
        "kernels": [{"kernel": "rms_norm", "shape": "given", "us": 1.0}],
        "load": [{"model": "tiny Qwen3", "num_blocks": 9, "seconds": 1.0}],
        "decode": [{"model": "tiny Qwen3", "batch": 1, "ms": 1.0}],
        "idle": [{"model": "other", "idle": 0.5}],
        "mixed": [{"model": "tiny Qwen3", "failed": "no time left"}],
        "shared": [{"model": "tiny Qwen3", "speedup": 2.0}],
    }
    out.write_text(json.dumps(given))
    parts = ("--part", "decode", "--part", "mixed", "--part", "shared")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--resume", "--out", out, *parts],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = json.loads(out.read_text())
    for part in ("kernels", "idle", "shared"):
        assert record[part] == given[part]
    assert record["load"][0] == given["load"][0]
    assert record["decode"][0] == given["decode"][0]
    assert [row["batch"] for row in record["decode"]] == [1, 3]
    (mixed,) = record["mixed"]
    assert mixed["output_per_s"] > 0
