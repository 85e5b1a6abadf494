"""`--threads` of `headgate up`: workers read it from the environment."""

from __future__ import annotations

import socket

import pytest
from click.testing import CliRunner

from gateway.cli import main as cli
from gateway.cli import model_workers, up
from gateway.cli.model import ServedModel


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ([], {}, "8"),
        (["--workers", "3"], {}, "2"),
        (["--workers", "9"], {}, "1"),
        (["--model", "a=/x", "--model", "/y"], {}, "4"),
        (["--model", "a=/x", "--model", "/y", "--workers", "2"], {}, "2"),
        (["--threads", "7"], {}, "7"),
        (["--workers", "2", "--threads", "5"], {}, "5"),
        ([], {"HEADGATE_THREADS": "3"}, "3"),
        (["--threads", "7"], {"HEADGATE_THREADS": "3"}, "7"),
    ],
)
def test_a_worker_has_the_threads_that_were_told_or_its_part_of_the_cores(
    arguments, environ, expected, monkeypatch, tmp_path
):
    monkeypatch.delenv("HEADGATE_THREADS", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(model_workers.os, "sched_getaffinity", lambda _: range(8))
    given = []

    async def run(options):
        start = up.Up(options)
        with socket.create_server(("127.0.0.1", 0)) as listening:
            start.socket = listening
            first, *_ = start.workers.place([ServedModel("m", tmp_path, model) for model in options.models])
            given.append(start.workers.spec(first).env["HEADGATE_THREADS"])
            start.workers.close()

    monkeypatch.setattr(up, "run", run)
    result = CliRunner(catch_exceptions=False).invoke(cli.main, ["up", "--home", str(tmp_path / "home"), *arguments])
    assert (result.exit_code, given) == (0, [expected]), result.output
