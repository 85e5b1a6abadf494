"""A wheel in a clean environment is the whole product: gateway and jobs without torch, everything with the extras."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaged import ROOT, clean_environment, ran

from gateway.cli.embedded import find_server


def environment_of(folder: Path, wheel: Path, extras: str) -> Path:
    """Returns the folder of programs of a new environment with the wheel, and nothing else of ours."""
    ran(sys.executable, "-m", "venv", folder)
    constraints = ROOT / "requirements" / "constraints.txt"
    pip = (folder / "bin" / "python", "-m", "pip", "install", "-q", "-c", constraints)
    ran(*pip, f"headgate{extras} @ {wheel.as_uri()}", cwd=folder, env=clean_environment())
    return folder / "bin"


def ask(url: str, key: str = "", body: dict | None = None) -> tuple[int, dict]:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@contextlib.contextmanager
def process(command: list[str], env: dict[str, str], cwd: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        running = subprocess.Popen(command, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        yield running
    finally:
        running.send_signal(signal.SIGTERM)
        running.wait(60)


def until(what, limit_s: float = 90):
    deadline = time.monotonic() + limit_s
    while True:
        with contextlib.suppress(OSError):
            if (found := what()) is not None:
                return found
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.2)


def test_the_wheel_has_what_the_repository_has(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        "accounting/migrations/script.py.mako",
        "gateway/console/templates/base.html",
        "workers/demo_model/model/model.safetensors",
        "workers/demo_model/model/chat_template.jinja",
        "accounting/values/setting_rows.tsv",
    }
    for folder, package in (
        ("migrations/versions", "accounting/migrations/versions"),
        ("gateway/limiter/lua", "gateway/limiter/lua"),
    ):
        wanted |= {f"{package}/{path.name}" for path in (ROOT / folder).iterdir() if path.is_file()}
    wanted |= {f"gateway/console/static/{path.name}" for path in (ROOT / "gateway/console/static").iterdir()}
    assert wanted - names == set()
    assert {name.partition("/")[0] for name in names} <= {
        "accounting",
        "cache",
        "gateway",
        "kernels",
        "workers",
        next(n for n in names if ".dist-info/" in n).partition("/")[0],
    }
    assert not [name for name in names if name.startswith("tests/") or name.endswith(".pyc")]


def test_the_base_install_has_no_torch_and_runs_gateway_and_jobs(wheel, tmp_path):
    programs = environment_of(tmp_path / "venv", wheel, "")
    python = programs / "python"
    listed = ran(python, "-m", "pip", "list", "--format", "freeze").lower()
    assert not [name for name in ("torch", "transformers", "triton", "numba", "pytest") if f"\n{name}==" in listed]
    home, port = tmp_path / "home", free_port()
    redis = tmp_path / "redis.sock"
    model = (
        python.parent.parent / "lib" / f"python3.{sys.version_info.minor}" / "site-packages/workers/demo_model/model"
    )
    env = clean_environment(
        HEADGATE_HOME=str(home),
        HEADGATE_BIND=f"127.0.0.1:{port}",
        HEADGATE_URL=f"http://127.0.0.1:{port}",
        HEADGATE_REDIS_URL=f"unix://{redis}",
        HEADGATE_BROKER_URL=f"redis+socket://{redis}?virtual_host=1",
        HEADGATE_MODELS=json.dumps({"headgate-demo": {"path": str(model)}}),
    )
    here = {"env": env, "cwd": tmp_path}
    ran(programs / "headgate", "migrate", **here)
    with (
        process(
            [find_server().path, "--port", "0", "--unixsocket", str(redis), "--save", ""],
            **here,
            log=tmp_path / "redis.log",
        ),
        process([str(programs / "headgate"), "gateway"], **here, log=tmp_path / "gateway.log") as gateway,
    ):
        url = env["HEADGATE_URL"]
        assert until(lambda: ask(f"{url}/livez"))[0] == 200
        with process([str(programs / "headgate"), "jobs"], **here, log=tmp_path / "jobs.log") as jobs:
            admin = json.loads(ran(programs / "headgate", "keys", "create", "--admin", "--json", **here))["value"]
            here["env"] = {**env, "HEADGATE_API_KEY": admin}
            ran(programs / "headgate", "tenants", "create", "acme", **here)
            ran(
                programs / "headgate",
                "prices",
                "add",
                "standard",
                "--rate",
                "headgate-demo=0.25,1.25,1.00,4.00",
                **here,
            )
            key = json.loads(ran(programs / "headgate", "keys", "create", "acme", "--json", **here))["value"]
            body = {"model": "headgate-demo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
            status, answer = ask(f"{url}/v1/chat/completions", key, body)
            assert (status, answer["error"]["code"]) == (503, "no_worker"), answer
            assert ask(f"{url}/v1/models", key)[1]["data"][0]["id"] == "headgate-demo"
            until(lambda: True if "celery" in (tmp_path / "jobs.log").read_text() else None)
            assert (gateway.poll(), jobs.poll()) == (None, None)
    assert json.loads(ran(programs / "headgate", "verify-books", "--json", **here))["ok"]


def test_headgate_up_works_without_the_repository(wheel, tmp_path):
    """The first quarter of an hour of who never sees the repository."""
    programs = environment_of(tmp_path / "venv", wheel, "[worker,embedded]")
    empty = tmp_path / "empty"
    empty.mkdir()
    ready = tmp_path / "ready.json"
    command = [
        str(programs / "headgate"),
        "up",
        "--home",
        str(tmp_path / "home"),
        "--port",
        "0",
        "--ready-file",
        str(ready),
    ]
    env = clean_environment()
    with process(command, env, empty, tmp_path / "up.log") as up:
        until(lambda: True if ready.exists() else (up.poll() is None and None), 180)
        told = json.loads(ready.read_text())
        assert Path(told["model_path"]).is_relative_to(tmp_path / "venv")
        body = {
            "model": told["model"],
            "messages": [{"role": "user", "content": "What does json.dumps do?"}],
            "max_tokens": 8,
        }
        status, answer = ask(told["base_url"] + "/v1/chat/completions", told["api_key"], body)
        assert (status, answer["usage"]["completion_tokens"] > 0) == (200, True), answer
        with urllib.request.urlopen(told["base_url"] + "/console", timeout=10) as page:
            assert b"<form" in page.read()
        for pid in (up.pid, *told["pids"]["gateway"], *told["pids"]["worker"], *told["pids"]["jobs"]):
            assert str(ROOT) not in Path(f"/proc/{pid}/maps").read_text(), "a file of the repository is in use"
            assert str(ROOT) not in os.readlink(f"/proc/{pid}/cwd")
        books = [programs / "headgate", "verify-books", "--json", "--home", tmp_path / "home"]
        until(
            lambda: True if subprocess.run(books, env=env, capture_output=True, check=False).returncode == 0 else None
        )
        ran(programs / "headgate", "backup", tmp_path / "b.tar", "--home", tmp_path / "home", env=env, cwd=empty)
    assert up.returncode == 0
