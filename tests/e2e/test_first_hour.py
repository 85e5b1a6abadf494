"""docs/first-hour.md, run as it is printed: each block of shell and Python, in order, in a clean folder.

The folder has what `make serve` reads of a clone, and this environment as its `.venv`. Two things differ from the page: the
port, because another may run on 8080, and that the second terminal's blocks are one shell.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "first-hour.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
BLOCKS = [(match[1], match[2]) for match in FENCE.finditer(PAGE)]
STEP = "echo '--- step {}'\n"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "headgate"
    (folder / "requirements").mkdir(parents=True)
    for name in ("Makefile", "pyproject.toml", "requirements/constraints.txt"):
        shutil.copy2(ROOT / name, folder / name)
        os.utime(folder / name, (0, 0))  # the environment is current: what installs it is not this test's matter
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def test_an_environment_that_has_no_pip_is_made_anew(clone: Path, tmp_path: Path) -> None:
    """A first start leaves one where Debian's package python3-venv is missing. Both interpreters are scripts here, as
    nothing is to be installed.
    """
    (clone / ".venv").unlink()
    half, python = clone / ".venv" / "bin" / "python", tmp_path / "python3"
    half.parent.mkdir(parents=True)
    half.write_text("#!/bin/sh\nexit 1\n")
    python.write_text(
        '#!/bin/sh\necho "$@" >> "$0.log"\n[ "$2" != venv ] || printf "#!/bin/sh\\n" > .venv/bin/python\n'
    )
    for script in (half, python):
        script.chmod(0o755)
    command = ["make", "setup", f"PYTHON={python}"]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "-m venv --clear .venv" in (tmp_path / "python3.log").read_text()


@pytest.fixture
def port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture
def serving(clone: Path, port: int) -> Iterator[dict[str, str]]:
    """The first terminal: the page's first block. Gives the environment of the second."""
    language, command = BLOCKS[0]
    assert (language, command) == ("sh", "make serve\n")
    kept = ("HEADGATE_HOME", "HEADGATE_API_KEY", "HEADGATE_URL")
    env = {name: value for name, value in os.environ.items() if name not in kept}
    with (clone.parent / "make.log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=clone,
            env={**env, "HEADGATE_PORT": str(port), "MAKEFLAGS": "", "ARGS": ""},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    deadline = time.monotonic() + 180
    while "Headgate is ready" not in (told := (clone.parent / "make.log").read_text()):
        assert process.poll() is None and time.monotonic() < deadline, told
        time.sleep(0.3)
    yield {**env, "HEADGATE_URL": f"http://127.0.0.1:{port}"}
    os.killpg(process.pid, signal.SIGINT)  # Ctrl-C
    process.wait(90)


@pytest.mark.timeout(900)
def test_every_block_runs_as_it_is_printed(clone, serving):
    script = "set -euo pipefail\n"
    for number, (language, text) in enumerate(BLOCKS[1:], start=1):
        script += STEP.format(number)
        script += text if language == "sh" else f"python - <<'END OF BLOCK'\n{text}END OF BLOCK\n"
        assert language in ("sh", "python"), "a block that nobody runs"
    done = subprocess.run(
        ["bash", "-c", script], cwd=clone, env=serving, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = dict(enumerate(done.stdout.split("--- step ")[1:], start=1))
    assert "data: [DONE]" in steps[3]
    cached = [int(line.split()[1]) for line in steps[4].splitlines()[1:]]
    assert cached[0] == 0
    assert min(cached[1:]) > 30, "the shared prompt is not found again"
    assert re.search(r"acme +headgate-demo +4 ", steps[5]), steps[5]
    assert "headgate-demo, cache_read" in steps[5]
    assert "due_at" in steps[6]
    assert "#" in steps[7]
    assert "FAILED" not in steps[8]
    with urllib.request.urlopen(serving["HEADGATE_URL"] + "/console", timeout=30) as page:
        assert b"<form" in page.read()


def test_the_page_tells_where_everything_is():
    assert len(BLOCKS) >= 8
    for target in re.findall(r"\]\(([\w-]+\.md)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
