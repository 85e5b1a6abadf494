"""What `headgate worker` and `headgate up` hand on to the worker process."""

from __future__ import annotations

import os
import sys

import pytest
from click.testing import CliRunner

from gateway.cli import up
from gateway.cli.main import DRAFT_MODEL, TENSOR_PARALLEL, main


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


@pytest.mark.parametrize(
    ("arguments", "ranks", "draft"),
    [((), "4", "/file"), (("--tensor-parallel", "2"), "2", "/file"), (("--draft-model", "/flag"), "4", "/flag")],
)
def test_a_flag_of_a_worker_wins_over_its_models_table_and_the_table_over_a_variable(
    tmp_path, monkeypatch, arguments, ranks, draft
):
    (tmp_path / "headgate.toml").write_text(
        "[models.m]\npath = '/m'\nengine_tensor_parallel = 4\nengine_draft_model = '/file'\n"
    )
    became = []
    for name in ("HEADGATE_HOME", "HEADGATE_CONFIG", "HEADGATE_CONFIG_NAMES", "HEADGATE_MODEL", "HEADGATE_MODEL_ID"):
        monkeypatch.setenv(name, "")  # the command sets it for good
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "execv", lambda *_: became.append(dict(os.environ)))
    variables = {TENSOR_PARALLEL: "8", DRAFT_MODEL: None, "HEADGATE_ENGINE_SPECULATE": None}
    done = CliRunner().invoke(main, ["worker", "--home", str(tmp_path), *arguments], env=variables)
    assert len(became) == 1, done.output
    assert (became[0][TENSOR_PARALLEL], became[0][DRAFT_MODEL]) == (ranks, draft)


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
