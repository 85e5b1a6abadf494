"""What installs and runs Headgate elsewhere: wheel, images, compose file, chart, units. `make test-packaging` runs these.

The tools lie in an environment of their own (`requirements/packaging.txt`). Images are built by buildah and run by
bubblewrap, both from Debian: no container engine is needed. The base image is made from Debian's packages under the name
that the Dockerfile asks for.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaged import LIMIT_S, ROOT, TOOLS, ran


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LIMIT_S))


@pytest.fixture(scope="session")
def tool() -> Callable[[str], str]:
    def find(name: str) -> str:
        # The wheel's own script drops the exit status, so the program inside it is called.
        inside = list(TOOLS.parent.glob(f"lib/python3*/site-packages/compose/{name}"))
        path = inside[0] if inside else TOOLS / name
        found = str(path) if path.exists() else shutil.which(name)
        if found is None:
            pytest.fail(f"{name} is not there: `make test-packaging` installs what PyPI has, apt-get the rest")
        return found

    return find


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built of what git tracks, in a clean folder."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in files.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    ran(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", out, source)
    return next(out.glob("*.whl"))
