"""A benchmark is run by its path, so its folder comes first where modules are looked for."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"gateway", "accounting", "workers", "cache", "kernels"}


def test_no_script_stands_before_a_package_of_its_name():
    assert not PACKAGES & {script.stem for script in (ROOT / "benchmarks").glob("*.py")}
