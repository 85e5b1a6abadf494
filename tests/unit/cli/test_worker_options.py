"""What `headgate worker` and `headgate up` hand on to the worker process."""

from __future__ import annotations

import os
import sys

import pytest
from click.testing import CliRunner

from gateway.cli import up
from gateway.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "environment", "expected"),
    [
        ((), {}, "1"),
        (("--tensor-parallel", "2"), {}, "2"),
        ((), {"HEADGATE_ENGINE_TENSOR_PARALLEL": "4"}, "4"),
        (("--tensor-parallel", "2"), {"HEADGATE_ENGINE_TENSOR_PARALLEL": "4"}, "2"),
    ],
)
def test_a_worker_is_told_its_number_of_ranks(tmp_path, monkeypatch, arguments, environment, expected):
    became = []
    monkeypatch.setenv("HEADGATE_HOME", "")  # the command sets it for good
    monkeypatch.setattr(os, "execv", lambda _, command: became.append((command, dict(os.environ))))
    command = ["worker", "--home", str(tmp_path), *arguments]
    CliRunner().invoke(main, command, env={"HEADGATE_ENGINE_TENSOR_PARALLEL": None, **environment})
    ((command, told),) = became
    assert command == [sys.executable, "-m", "workers.engine"]
    assert told["HEADGATE_ENGINE_TENSOR_PARALLEL"] == expected


def test_up_passes_the_number_of_ranks_on(tmp_path, monkeypatch):
    seen = []

    async def run(options):
        seen.append(options)

    monkeypatch.setattr(up, "run", run)
    CliRunner().invoke(main, ["up", "--home", str(tmp_path), "--tensor-parallel", "2"])
    assert seen[0].tensor_parallel == 2


def test_a_number_of_ranks_that_makes_no_sense_is_refused(tmp_path):
    done = CliRunner().invoke(main, ["worker", "--home", str(tmp_path), "--tensor-parallel", "0"])
    assert done.exit_code == 2 and "0 is not in the range" in done.output
