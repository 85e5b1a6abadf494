"""Threads of a worker do not look for work for longer than a turn of the system's scheduler."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from workers.process import waiting


def test_a_users_own_setting_remains() -> None:
    for own in ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}):
        environment = dict(own)
        waiting.bound(environment)
        assert environment == own


def test_libgomp_takes_the_bound() -> None:
    """The library prints what it has read when torch loads it."""
    code = "from workers.process import waiting; waiting.bound(); import torch; torch.ones(1 << 16).sum()"
    taken = {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}
    environment = {name: value for name, value in os.environ.items() if name not in taken}
    told = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"OMP_DISPLAY_ENV": "VERBOSE"},
        capture_output=True,
        text=True,
        check=True,
    )
    if "GOMP_SPINCOUNT" not in told.stderr:
        pytest.skip("torch has another OpenMP library here")
    assert "GOMP_SPINCOUNT = '10000'" in told.stderr
