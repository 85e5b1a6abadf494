"""The tests in tests/packaging share this: the tools, a command that must succeed, and an environment without us."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = Path(sys.prefix) / "tools" / "bin"
LIMIT_S = 1800


def ran(*command: str | Path, **options: object) -> str:
    """Runs a command; a failure fails the test with what it printed."""
    told = [str(part) for part in command]
    done = subprocess.run(told, capture_output=True, text=True, timeout=LIMIT_S, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(told)}\n{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def clean_environment(**more: str) -> dict[str, str]:
    """An environment in which nothing leads to the repository."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    kept |= {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_"))}
    return {**kept, "OMP_NUM_THREADS": "1", **more}
