"""benchmarks/start.py measures a real start: numbers for every process, and less memory than separate programs would take."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks" / "start.py"


@pytest.mark.rest
@pytest.mark.timeout(600)
def test_it_measures_two_starts(tmp_path):
    out = tmp_path / "start.json"
    command = [sys.executable, str(SCRIPT), "--idle-s", "3", "--settle-s", "5", "--out", str(out)]
    subprocess.run(command, check=True, capture_output=True, timeout=550)
    found = json.loads(out.read_text())
    for start in (found["first start"], found["second start"]):
        assert {"up", "redis", "worker-0", "gateway-0", "jobs"} == start["memory_mb"].keys()
        assert all(size > 0 for size in start["memory_mb"].values())
        assert start["cpu_until_ready_s"]["worker-0"] > 0
        assert start["memory_without_workers_mb"] < 330  # 430 MB before gateways and jobs were forked
