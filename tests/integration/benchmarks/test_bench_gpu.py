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
