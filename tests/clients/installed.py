"""Where `make test-clients` has installed the clients, and how a snippet is run with them."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from clients.pages import ROOT, Snippet

INSTALLED = ROOT / ".venv-clients"
VENVS = {generation: INSTALLED / f"openai-{generation}" for generation in (2, 3)}
"""Half of the Python clients go with openai 3 only, the others with openai 2."""
NODE = INSTALLED / "node"
NODE_MODULES = NODE / "node_modules"
MUST_RUN = os.environ.get("HEADGATE_TEST_CLIENTS") == "1"
LIMIT_S = 100


def require(path: Path) -> Path:
    """Skips, or fails under `make test-clients`, where a client is not installed."""
    if not path.exists():
        reason = f"{path.relative_to(ROOT)} is not there: `make test-clients` installs the clients"
        pytest.fail(reason) if MUST_RUN else pytest.skip(reason)
    return path


def program(name: str) -> Path:
    """One from npm."""
    return require(NODE_MODULES / ".bin" / name)


def command(snippet: Snippet, generation: int = 3) -> list[str]:
    if snippet.language == "python":
        return [str(require(VENVS[generation] / "bin" / "python")), "-u", "-c", snippet.text]
    if snippet.language == "js":
        require(NODE_MODULES)
        return ["node", "--input-type=module", "-e", snippet.text]
    assert snippet.language == "sh", snippet
    for path in (*VENVS.values(), NODE_MODULES):
        require(path)
    return ["bash", "-euo", "pipefail", "-c", snippet.text]


@dataclass(frozen=True)
class Done:
    code: int
    output: str
    errors: str

    def __str__(self) -> str:
        return f"exit status {self.code}\n--- output\n{self.output}\n--- errors\n{self.errors}"


async def run(arguments: list[str], env: Mapping[str, str], cwd: Path = NODE, limit_s: float = LIMIT_S) -> Done:
    """With this environment and the search path only: no key or proxy of this machine gets to a client."""
    process = await asyncio.create_subprocess_exec(
        *arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=cwd,
        env={"PATH": _path(), "LANG": "C.UTF-8", **env},
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), limit_s)
    except TimeoutError:
        process.kill()
        output, errors = await process.communicate()
        errors += b"\nended by the test after its limit"
    assert process.returncode is not None
    return Done(process.returncode, output.decode(), errors.decode())


def _path() -> str:
    programs = [VENVS[2] / "bin", NODE_MODULES / ".bin"]
    return os.pathsep.join([*map(str, programs), os.environ["PATH"]])
