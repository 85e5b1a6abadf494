"""`headgate up` tells its workers their threads in the environment, and waits for a drain as long as it may take."""

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


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, 80), ({"DRAIN_S": "300"}, 320), ({"DRAIN_S": "1"}, 75), ({"DRAIN_S": "300", "DRAIN_GRACE_S": "30"}, 345)],
)
def test_a_stop_kills_no_process_before_it_has_drained(environ, expected, monkeypatch, tmp_path):
    for name in ("DRAIN_S", "DRAIN_GRACE_S"):
        monkeypatch.delenv(f"HEADGATE_{name}", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(f"HEADGATE_{name}", value)
    given = []

    async def run(options):
        start = up.Up(options)
        with socket.create_server(("127.0.0.1", 0)) as start.socket:
            start._gateways_ops = [start.socket]
            first, *_ = start.workers.place([ServedModel("m", tmp_path, model) for model in options.models])
            given.extend(spec.stop_limit_s for spec in (start.workers.spec(first), start._gateway(0)))
            start.workers.close()

    monkeypatch.setattr(up, "run", run)
    result = CliRunner(catch_exceptions=False).invoke(cli.main, ["up", "--home", str(tmp_path / "home")])
    assert (result.exit_code, given) == (0, [expected] * 2), result.output
