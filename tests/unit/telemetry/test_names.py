"""One module knows the convention's names."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_no_other_module_has_a_gen_ai_literal():
    found = subprocess.run(
        ["grep", "-rlF", "--include=*.py", "gen_ai.", "gateway", "accounting", "workers", "cache", "kernels"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert found == ["gateway/telemetry/names.py"]
