"""`--draft-model` of `headgate worker` and `headgate up`: workers read it from the environment."""

from __future__ import annotations

import os

import pytest
from click.testing import CliRunner

from gateway.cli import main as cli

NAMES = (cli.DRAFT_MODEL, "HEADGATE_ENGINE_SPECULATE", "HEADGATE_ENGINE_TENSOR_PARALLEL", "HEADGATE_HOME")


@pytest.fixture
def started(monkeypatch, tmp_path):
    """The environment of the process that `headgate worker` becomes."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    found = {}
    monkeypatch.setattr(cli.os, "execv", lambda *_: found.update(os.environ))

    def start(*arguments):
        result = CliRunner().invoke(cli.main, ["worker", "--home", str(tmp_path), *arguments])
        assert result.exit_code == 0, result.output
        return found

    return start


def test_a_draft_model_is_told_to_the_worker_and_used(started):
    env = started("--draft-model", "small/one")
    assert env[cli.DRAFT_MODEL] == "small/one"
    assert env["HEADGATE_ENGINE_SPECULATE"] == "draft"


def test_without_the_flag_nothing_is_set(started):
    env = started()
    assert cli.DRAFT_MODEL not in env
    assert "HEADGATE_ENGINE_SPECULATE" not in env


def test_another_proposer_that_was_asked_for_stays_so_that_the_worker_refuses_both(started, monkeypatch):
    monkeypatch.setenv("HEADGATE_ENGINE_SPECULATE", "ngram")
    assert started("--draft-model", "small/one")["HEADGATE_ENGINE_SPECULATE"] == "ngram"


@pytest.mark.parametrize("command", ["up", "worker"])
def test_help_names_the_flag(command):
    assert "--draft-model" in CliRunner().invoke(cli.main, [command, "--help"]).output
