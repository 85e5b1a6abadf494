"""What `headgate doctor` says of a port that is taken and of secrets that a cluster mounts."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from accounting.database import migrate
from accounting.ledger.write_off_sums import TenantLoss
from gateway.base.home import Home
from gateway.cli import doctor_checks, doctor_database
from gateway.cli.finding import Installation


class Answers(BaseHTTPRequestHandler):
    request_id = ""

    def do_GET(self) -> None:
        self.send_response(200)
        if self.path == "/livez" and self.request_id:
            self.send_header("x-request-id", self.request_id)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@pytest.fixture
def taken(request: pytest.FixtureRequest) -> Iterator[int]:
    """The port of a server whose answers have this request id."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("One", (Answers,), {"request_id": request.param}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("taken", "state", "words"),
    [("req_1", "ok", "a Headgate answers at"), ("", "failing", "Address already in use"), ("other", "failing", "")],
    indirect=["taken"],
)
def test_a_port_that_a_gateway_listens_on_by_itself_is_in_order(taken, state, words, tmp_path):
    installation = Installation(Home(tmp_path), {"HEADGATE_PORT": str(taken)})
    (found,) = doctor_checks.port(installation)
    assert (found.state, words in found.says) == (state, True), found


@pytest.mark.parametrize(
    ("mode", "read_only", "state", "words"),
    [
        (0o600, False, "ok", ""),
        (0o440, False, "failing", "chmod 600"),
        (0o440, True, "ok", "read-only mount"),
        (0o444, True, "failing", "defaultMode"),
        (0o604, False, "failing", "chmod 600"),
    ],
)
def test_a_secret_may_be_read_by_its_group_where_it_is_mounted_read_only(
    mode, read_only, state, words, tmp_path, monkeypatch
):
    (tmp_path / "secrets").mkdir()
    for name in ("pepper", "master.key"):
        (tmp_path / "secrets" / name).write_bytes(bytes(32))
        (tmp_path / "secrets" / name).chmod(mode)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY if read_only else 0))
    found = list(doctor_checks.secrets(Installation(Home(tmp_path), {})))
    assert [one.state for one in found] == [state, state]
    assert all(words in f"{one.says} {one.fix}" for one in found), found


def test_no_hint_installs_the_package_that_has_our_name_elsewhere():
    """On PyPI `headgate` is another project: a hint names the packages of an extra, or where this one is from."""
    root = Path(doctor_checks.__file__).parents[2]
    texts = {
        path: path.read_text()
        for folder in ("gateway", "workers", "accounting")
        for path in (root / folder).rglob("*.py")
    }
    for path, text in texts.items():
        assert "headgate[embedded" not in text and "headgate[worker" not in text and "headgate[export" not in text, path
        assert "install headgate" not in text and "constraints.txt headgate" not in text, path


@pytest.mark.parametrize(
    ("environ", "is_warned"),
    [
        ({}, False),
        ({"HEADGATE_HOST": "localhost"}, False),
        ({"HEADGATE_HOST": "0.0.0.0"}, True),
        ({"HEADGATE_HOST": "0.0.0.0", "HEADGATE_TRUSTED_NETWORKS": "10.0.0.0/8"}, False),
        ({"HEADGATE_BIND": "[::]:8080"}, True),
        ({"HEADGATE_BIND": "127.0.0.1:8080", "HEADGATE_HOST": "0.0.0.0"}, False),
    ],
)
def test_keys_that_would_travel_in_the_clear_are_a_warning(environ: dict[str, str], is_warned: bool, tmp_path: Path):
    found = list(doctor_checks.clear_text(Installation(Home(tmp_path), environ)))
    assert [(one.state, "proxy with TLS" in one.fix) for one in found] == [("warning", True)] * is_warned


@pytest.mark.parametrize(("flush_s", "state"), [(0.002, "ok"), (0.03, "warning")])
def test_the_disk_is_judged_by_the_median_of_its_flushes(tmp_path, monkeypatch, flush_s, state):
    now, num_flushes = 0.0, 0

    def flush(_: int) -> None:
        nonlocal now, num_flushes
        num_flushes += 1
        now += 9.0 if num_flushes == 3 else flush_s

    monkeypatch.setattr(doctor_checks.os, "fdatasync", flush)
    monkeypatch.setattr(doctor_checks.time, "perf_counter", lambda: now)
    (found,) = doctor_checks.flushes(Installation(Home(tmp_path), {}))
    assert (found.state, num_flushes, list(tmp_path.iterdir())) == (state, doctor_checks.NUM_FLUSHES, [])
    assert f"takes {flush_s * 1000:.1f} ms" in found.says


def test_tenants_of_whom_much_was_written_off_are_a_warning_and_five_are_named(monkeypatch, tmp_path):
    home = Home(tmp_path)
    assert list(doctor_database.write_offs(Installation(home, {}))) == []
    lost = [TenantLoss(f"proj_{number}", 2_000, 0.0251, "worker_crash") for number in range(7)]
    given = Installation(home, {"HEADGATE_DATABASE_URL": "sqlite:////given"})
    monkeypatch.setattr(doctor_database.migrate, "check", lambda _: None)
    for now, state, words in ((lost, "warning", "proj_0 2.5% (worker_crash), "), ([], "ok", "at most 1 %")):
        monkeypatch.setattr(doctor_database, "_read", lambda *_, now=now: now)
        (found,) = doctor_database.write_offs(given)
        assert (found.state, words in found.says) == (state, True), found
        assert now == [] or found.says.endswith("proj_4 2.5% (worker_crash) and of 2 more")


def test_doctor_reads_what_was_written_off_from_a_database(tmp_path):
    url = f"sqlite+aiosqlite:///{tmp_path / 'headgate.db'}"
    for unreadable in (url, f"sqlite:///{tmp_path}", "nonsense"):  # the check of the database tells
        given = Installation(Home(tmp_path), {"HEADGATE_DATABASE_URL": unreadable})
        assert list(doctor_database.write_offs(given)) == [], unreadable
    migrate.upgrade(url)
    (found,) = doctor_database.write_offs(Installation(Home(tmp_path), {"HEADGATE_DATABASE_URL": url}))
    assert found.state == "ok"
