"""What cannot start says why in one sentence, without a traceback, and exits non-zero."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import subprocess
from pathlib import Path

import pytest
from load import stretched
from running import HEADGATE

DEMO = Path(__file__).resolve().parents[2] / "ops/demo_model/model"


def refused(home: Path, *arguments: str, env: dict[str, str] | None = None, status: int | None = None) -> str:
    done = subprocess.run(
        [HEADGATE, "up", "--home", str(home), *arguments],
        capture_output=True,
        text=True,
        timeout=stretched(100),
        env={**os.environ, **(env or {})},
    )
    assert done.returncode != 0
    assert status in (None, done.returncode)
    output = done.stdout + done.stderr
    assert "Traceback" not in output, output
    lines = [line for line in done.stderr.splitlines() if line.startswith("headgate: ")]
    assert len(lines) == 1, output
    return lines[0]


def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        assert str(port) in refused(tmp_path / "home", "--port", str(port))


def test_a_second_up_in_the_same_home_is_refused(server):
    assert "already runs" in refused(server.home, "--port", "0")


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json"),
        (lambda d: (d / "config.json").write_text("{"), "config.json"),
        (lambda d: (d / "model.safetensors").unlink(), "safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\0" * 64), "model.safetensors"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer"),
    ],
    ids=["no config", "broken config", "no weights", "broken weights", "broken tokenizer"],
)
def test_a_broken_model_directory_is_refused(tmp_path, damage, names):
    directory = tmp_path / "model"
    shutil.copytree(DEMO, directory)
    damage(directory)
    assert names in refused(tmp_path / "home", "--port", "0", "--model", str(directory))


def test_a_model_that_does_not_exist_is_refused(tmp_path):
    assert "not a directory" in refused(tmp_path / "home", "--port", "0", "--model", "/nonexistent/model")


def test_a_hub_id_that_cannot_be_fetched_is_refused(tmp_path):
    env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    assert "nobody/nothing" in refused(tmp_path / "home", "--port", "0", "--model", "nobody/nothing", env=env)


def test_a_database_newer_than_the_code_is_refused(tmp_path):
    home = tmp_path / "home"
    subprocess.run([HEADGATE, "migrate", "--home", str(home)], check=True, capture_output=True)
    with sqlite3.connect(home / "headgate.db") as connection:
        connection.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    connection.close()
    assert "newer" in refused(home, "--port", "0", status=os.EX_CONFIG)


def test_a_damaged_key_file_is_refused(tmp_path):
    home = tmp_path / "home"
    subprocess.run([HEADGATE, "migrate", "--home", str(home)], check=True, capture_output=True)
    (home / "secrets/pepper").write_bytes(b"short")
    assert "pepper" in refused(home, "--port", "0")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_key_file_is_refused(tmp_path):
    home = tmp_path / "home"
    subprocess.run([HEADGATE, "migrate", "--home", str(home)], check=True, capture_output=True)
    (home / "secrets/pepper").chmod(0)
    assert "pepper" in refused(home, "--port", "0")


def test_a_key_file_that_is_a_directory_is_refused(tmp_path):
    home = tmp_path / "home"
    subprocess.run([HEADGATE, "migrate", "--home", str(home)], check=True, capture_output=True)
    (home / "secrets/master.key").unlink()
    (home / "secrets/master.key").mkdir()
    assert "master.key" in refused(home, "--port", "0")


def test_an_unreachable_redis_is_named(tmp_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    assert "HEADGATE_REDIS_URL" in refused(
        tmp_path / "home", "--port", "0", env={"HEADGATE_REDIS_URL": f"redis://127.0.0.1:{port}/0"}
    )


def test_an_unparsable_setting_is_named(tmp_path):
    assert "HEADGATE_BLOCK_SIZE" in refused(tmp_path / "home", "--port", "0", env={"HEADGATE_BLOCK_SIZE": "many"})
