"""What pip installs for a GPU: in the CUDA image, and by `make setup` on an ordinary machine. The public index resolves
it; nothing of it is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from packaged import ROOT

DOCKERFILE = (ROOT / "Dockerfile").read_text()
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
INDEX = "https://pypi.org/simple"


def stage(name: str) -> str:
    """Returns the instructions of a stage, with continued lines joined."""
    found = re.search(rf"^FROM \S+ AS {name}$(.*?)(?=^FROM )", DOCKERFILE, re.M | re.S)
    assert found is not None
    return found[1].replace("\\\n", " ")


def commands(name: str) -> list[str]:
    """Returns the commands of the stage's RUN instructions."""
    lines = re.findall(r"^RUN (.*)$", stage(name), re.M)
    return [one.strip() for line in lines for one in line.split("&&")]


def resolved(wanted: list[str], report: Path) -> subprocess.CompletedProcess[str]:
    """Resolves by the wheels' metadata alone, from PyPI alone: a local build of torch would hide what a CUDA one needs."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    cert = os.environ.get("PIP_CERT")
    command = [sys.executable, "-m", "pip", "--isolated", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--index-url", INDEX, "--report", str(report)]
    command += [*(("--cert", cert) if cert else ()), "-c", str(CONSTRAINTS), *wanted]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=env)


def has_the_triton_of_its_torch(report: Path) -> dict[str, str]:
    """Asserts that the torch found is one for CUDA and that all pins hold; returns the versions found by name."""
    found = {one["metadata"]["name"].lower(): one["metadata"] for one in json.loads(report.read_text())["install"]}
    torch = found["torch"]
    assert "+cpu" not in torch["version"]
    assert any(name.startswith("nvidia-cudnn-cu") for name in found), sorted(found)
    [required] = {one.split(";")[0].strip() for one in torch["requires_dist"] if one.startswith("triton")}
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", CONSTRAINTS.read_text(), re.M))
    assert required == f"triton=={found['triton']['version']}" == f"triton=={pins['triton']}"
    versions = {name: one["version"] for name, one in found.items()}
    assert versions["torch"] == pins["torch"]
    return {name: version for name, version in versions.items() if pins.get(name, version) != version}


def test_its_pip_command_finds_a_torch_for_cuda_with_the_triton_that_it_requires(tmp_path):
    [install] = [one for one in commands("worker-cuda-install") if one.startswith("/opt/build/bin/pip ")]
    words = shlex.split(install)
    assert words[words.index("-c") + 1] == str(CONSTRAINTS.relative_to(ROOT))
    extra = re.search(r"headgate\[([a-z,]+)\]", install)
    assert extra is not None
    report = tmp_path / "report.json"
    done = resolved([f"{ROOT}[{extra[1]}]"], report)
    assert done.returncode == 0, done.stderr
    assert has_the_triton_of_its_torch(report) == {}


def test_the_first_command_of_make_setup_resolves_where_no_local_build_of_torch_hides_what_it_requires(tmp_path):
    setup = (ROOT / "Makefile").read_text()
    [wanted] = re.findall(r"pip install .*-c requirements/constraints\.txt (torch)$", setup, re.M)
    report = tmp_path / "report.json"
    done = resolved([wanted], report)
    assert done.returncode == 0, done.stderr
    assert has_the_triton_of_its_torch(report) == {}
