"""Starts the real thing, `headgate up`, as a user would. Used by tests/e2e and tests/chaos."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest
from load import stretched
from prometheus_client.parser import text_string_to_metric_families

HEADGATE = str(Path(sys.executable).parent / "headgate")
START_LIMIT_S = 120.0
LONGEST_START_S = 220.0
"""Less than pytest gives a whole test, so that a start that fails still shows what it printed."""
STOP_LIMIT_S = 60.0


@dataclass
class Server:
    """One running `headgate up`."""

    process: subprocess.Popen[bytes]
    home: Path
    ready_file: Path
    output: Path

    @property
    def ready(self) -> dict[str, Any]:
        return json.loads(self.ready_file.read_text())

    @property
    def model(self) -> str:
        return self.ready["model"]

    def client(self, api_key: str | None = None, **options: Any) -> openai.OpenAI:
        ready = self.ready
        return openai.OpenAI(
            base_url=ready["base_url"] + "/v1", api_key=api_key or ready["api_key"], timeout=stretched(60), **options
        )

    def async_client(self, api_key: str | None = None, **options: Any) -> openai.AsyncOpenAI:
        ready = self.ready
        return openai.AsyncOpenAI(
            base_url=ready["base_url"] + "/v1", api_key=api_key or ready["api_key"], timeout=stretched(60), **options
        )

    def admin(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        ready = self.ready
        answer = httpx.request(
            method,
            ready["base_url"] + path,
            headers={"Authorization": f"Bearer {ready['admin_key']}"},
            timeout=stretched(30),
            **options,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    def tenant_key(self, name: str) -> tuple[str, str]:
        """A new tenant's (id, api key), made as an operator makes it."""
        project = self.admin("POST", "/v1/organization/projects", json={"name": name})
        account = self.admin(
            "POST", f"/v1/organization/projects/{project['id']}/service_accounts", json={"name": "test"}
        )
        return project["id"], account["api_key"]["value"]

    def command(self, *arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [HEADGATE, *arguments, "--home", str(self.home)],
            capture_output=True,
            text=True,
            timeout=stretched(60),
            env={**os.environ, **(env or {})},
        )

    def verify_books(self, limit_s: float = 30.0, env: dict[str, str] | None = None) -> dict[str, Any]:
        """The report once everything is shipped; asserts that the books are clean."""
        deadline = time.monotonic() + stretched(limit_s)
        while True:
            done = self.command("verify-books", "--json", env=env)
            if done.returncode == 0 or time.monotonic() > deadline:
                assert done.returncode == 0, done.stdout + done.stderr
                return json.loads(done.stdout)
            time.sleep(0.3)

    def witnessed(self, limit_s: float = 10.0) -> None:
        """Waits until each settle in the embedded database has an engine record, which may come after it."""
        deadline = time.monotonic() + stretched(limit_s)
        late = (
            "SELECT COUNT(*) FROM ledger_entry e WHERE kind = 'settle' AND NOT EXISTS"
            " (SELECT 1 FROM engine_record r WHERE r.request_id = e.request_id)"
        )
        while num_late := self.sql(late)[0][0]:
            assert time.monotonic() < deadline, f"{num_late} requests have no engine record"
            time.sleep(0.05)

    def sql(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        """Reads the embedded database beside the running server."""
        with contextlib.closing(sqlite3.connect(f"file:{self.home}/headgate.db?mode=ro", uri=True)) as connection:
            return connection.execute(statement, values).fetchall()

    def engine_counters(self, worker: int | None = None) -> dict[str, float]:
        """A worker's own metrics, or their sums over all workers."""
        totals: dict[str, float] = {}
        urls = self.ready["metrics"]["worker"]
        for url in urls if worker is None else urls[worker : worker + 1]:
            for family in text_string_to_metric_families(httpx.get(url, timeout=10).text):
                for sample in family.samples:
                    labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
                    inner = ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))
                    name = sample.name + (f"{{{inner}}}" if inner else "")
                    totals[name] = totals.get(name, 0.0) + sample.value
        return totals

    def stop(self, number: signal.Signals = signal.SIGINT) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(STOP_LIMIT_S)


PATIENT = {"HEADGATE_ENGINE_TTFT_TARGET_MS": "120000"}
"""These settings are for tests that send more at once than a slow machine computes in the usual time: they are not
about overload."""


def start(home: Path, *arguments: str, env: dict[str, str] | None = None) -> Server:
    """Returns once the ready file is there; fails with what the command printed."""
    home.mkdir(parents=True, exist_ok=True)
    ready_file, output = (home.parent / f"{home.name}-ready.json", home.parent / f"{home.name}-up.txt")
    ready_file.unlink(missing_ok=True)
    command = [HEADGATE, "up", "--home", str(home), "--port", "0", "--ready-file", str(ready_file), *arguments]
    with output.open("ab") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env={**os.environ, **(env or {})}
        )
    deadline = time.monotonic() + min(stretched(START_LIMIT_S), LONGEST_START_S)
    while not ready_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            pytest.fail(f"headgate up did not get ready:\n{output.read_text()[-3000:]}\n{_logs(home)}")
        time.sleep(0.05)
    return Server(process, home, ready_file, output)


def _logs(home: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()[-1500:]}" for p in sorted((home / "logs").glob("*.log")))


Starter = Callable[..., Server]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[Starter]:
    """Starts servers in homes below tmp_path; whatever still runs at the end is stopped."""
    servers: list[Server] = []

    def starter(*arguments: str, home: str = "home", env: dict[str, str] | None = None) -> Server:
        server = start(tmp_path / home, *arguments, env=env)
        servers.append(server)
        return server

    yield starter
    for server in servers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.stop(signal.SIGTERM)
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that leave it as they found it."""
    running = start(tmp_path_factory.mktemp("e2e") / "home")
    yield running
    code = running.stop(signal.SIGTERM)
    assert code == 0, running.output.read_text()
