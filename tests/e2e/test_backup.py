"""A used home is copied while it is used, put elsewhere, upgraded, and given new secrets; its books stay clean."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sqlite3
import subprocess
import tarfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import openai
import psycopg
import pytest
from load import stretched
from running import HEADGATE, start

OLD_HOME = Path(__file__).parents[1] / "old_home"
BATCH_LINE = {"custom_id": "one", "method": "POST", "url": "/v1/completions"}


def run(*arguments: str, home: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [HEADGATE, *arguments, "--home", str(home)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=stretched(120), env={**os.environ, **(env or {})}
    )


def used(server) -> dict[str, str]:
    """Gives the server a tenant, charges, a file, a batch, a webhook and an upstream; returns what a client remembers of them."""
    tenant, key = server.tenant_key("acme")
    client = server.client(key)
    for number in range(3):
        client.completions.create(model=server.model, prompt=f"def f{number}(", max_tokens=8)
    line = {**BATCH_LINE, "body": {"model": server.model, "prompt": "import ", "max_tokens": 4}}
    file = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    deadline = time.monotonic() + stretched(60)
    while client.batches.retrieve(batch.id).status != "completed":
        assert time.monotonic() < deadline
        time.sleep(0.3)
    hook = server.admin("POST", "/admin/v1/webhooks", json={"url": "https://example.org/hook"})
    upstream = {"name": "spare", "url": "http://127.0.0.1:9/v1", "models": {"spare": {}}}
    server.admin("POST", "/admin/v1/upstreams", json=upstream | {"credential": "sk-1", "cost_credential": "sk-2"})
    return {"tenant": tenant, "key": key, "file": file.id, "webhook": hook["id"]}


@dataclass(frozen=True)
class Used:
    """A home that was used and then stopped."""

    home: Path
    known: dict[str, str]

    def copied_to(self, home: Path) -> dict[str, str]:
        """Returns what a client remembers of it."""
        shutil.copytree(self.home, home, ignore=shutil.ignore_patterns("*.sock"))
        return self.known


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Used:
    server = start(tmp_path_factory.mktemp("used") / "home")
    try:
        known = used(server)
        assert server.stop() == 0
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()
    return Used(server.home, known)


def still_works(server, known: dict[str, str]) -> None:
    """The key, the sealed file and the charges are there, and what comes next is charged, too."""
    client = server.client(known["key"])
    content = client.files.content(known["file"]).text
    assert json.loads(content)["custom_id"] == "one"
    assert client.completions.create(model=server.model, prompt="def g(", max_tokens=4).usage.completion_tokens
    assert known["webhook"] in {hook["id"] for hook in server.admin("GET", "/admin/v1/webhooks")["data"]}
    [upstream] = server.admin("GET", "/admin/v1/upstreams")[
        "data"
    ]  # one whose credentials cannot be opened is left out
    assert (upstream["id"], upstream["has_credential"]) == ("spare", True)


def num_requests(server) -> int:
    return server.sql("SELECT COUNT(*) FROM ledger_entry")[0][0]


async def traffic(server, known: dict[str, str], work) -> int:
    """Runs `work` in a thread beside requests that come and end all the time; returns how many ended."""
    ended = 0

    async def one(client, until: asyncio.Event) -> None:
        nonlocal ended
        while not until.is_set():
            await client.completions.create(
                model=server.model, prompt="def h(", max_tokens=6, extra_body={"ignore_eos": True}
            )
            ended += 1

    stop = asyncio.Event()
    async with server.async_client(known["key"]) as client:
        running = [asyncio.create_task(one(client, stop)) for _ in range(4)]
        await asyncio.sleep(1)
        await asyncio.to_thread(work)
        await asyncio.sleep(0.5)
        stop.set()
        await asyncio.gather(*running)
    return ended


def test_a_backup_that_is_taken_under_load_is_restored_with_clean_books(stopped, start_server, tmp_path):
    known = stopped.copied_to(tmp_path / "home")
    server = start_server()
    running = run("secrets", "rotate-master-key", home=server.home)
    assert running.returncode == 1
    assert "stop it first" in running.stderr
    file = tmp_path / "backup.tar"
    taken: list[subprocess.CompletedProcess[str]] = []
    asyncio.run(traffic(server, known, lambda: taken.append(run("backup", str(file), home=server.home))))
    assert taken[0].returncode == 0, taken[0].stderr
    again = run("backup", str(file), home=server.home)
    assert again.returncode == 1
    assert "nothing is overwritten" in again.stderr
    assert "Traceback" not in again.stderr
    refused = run("restore", str(file), home=server.home)
    assert (refused.returncode, "is not empty" in refused.stderr) == (1, True), refused.stderr
    before = num_requests(server)
    assert server.stop() == 0

    assert run("restore", "--check", str(file), home=tmp_path / "elsewhere").returncode == 0
    assert not (tmp_path / "elsewhere").exists()
    restored = run("restore", str(file), home=tmp_path / "second")
    assert restored.returncode == 0, restored.stdout + restored.stderr
    second = start_server(home="second")
    assert second.ready["api_key"] == json.loads((server.home / "credentials.json").read_text())["api_key"]
    still_works(second, known)
    assert second.verify_books()["ok"]
    assert 4 < num_requests(second) <= before + 1


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
@pytest.mark.skipif(shutil.which("pg_dump") is None, reason="pg_dump is not on PATH")
def test_a_backup_of_postgresql_is_restored_into_an_empty_database_alone(start_server, database_url, tmp_path):
    env = {"HEADGATE_DATABASE_URL": database_url}
    server = start_server(env=env)
    known = used(server)
    file = tmp_path / "backup.tar"
    taken = run("backup", str(file), home=server.home, env=env)
    assert taken.returncode == 0, taken.stderr
    assert server.stop() == 0
    refused = run("restore", str(file), home=tmp_path / "second", env=env)
    assert refused.returncode == 1
    assert "createdb" in refused.stderr
    assert not any((tmp_path / "second").iterdir()) if (tmp_path / "second").exists() else True
    other_kind = run("restore", str(file), home=tmp_path / "second")
    assert other_kind.returncode == 1
    assert "another kind of database" in other_kind.stderr

    base, _, name = database_url.rpartition("/")
    plain = base.replace("postgresql+psycopg", "postgresql") + "/postgres"
    empty = f"{name[:40]}_{uuid.uuid4().hex[:6]}"
    with psycopg.connect(plain, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{empty}"')
    try:
        env = {"HEADGATE_DATABASE_URL": f"{base}/{empty}"}
        restored = run("restore", str(file), home=tmp_path / "second", env=env)
        assert restored.returncode == 0, restored.stdout + restored.stderr
        second = start_server(home="second", env=env)
        still_works(second, known)
        assert second.verify_books(env=env)["ok"]
        assert second.stop() == 0
    finally:
        with psycopg.connect(plain, autocommit=True) as connection:
            connection.execute(f'DROP DATABASE "{empty}" WITH (FORCE)')


def test_the_master_key_and_the_pepper_are_replaced_and_what_was_sealed_is_read(stopped, start_server, tmp_path):
    home = tmp_path / "home"
    known = stopped.copied_to(home)
    secrets = home / "secrets"
    old = {name: (secrets / name).read_bytes() for name in ("master.key", "pepper")}
    for command in ("rotate-master-key", "rotate-pepper"):
        done = run("secrets", command, home=home)
        assert done.returncode == 0, done.stderr
    assert (secrets / "master.key").read_bytes() != old["master.key"]
    assert (secrets / "pepper").read_bytes()[32:] == old["pepper"]

    second = start_server()
    still_works(second, known)
    fresh = second.tenant_key("made-after")[1]
    assert second.verify_books()["ok"]
    assert second.stop() == 0

    dropped = run("secrets", "drop-old-peppers", "--yes", home=home)
    assert dropped.returncode == 0, dropped.stderr
    admin = re.search(r"hg_admin_\w+", dropped.stdout)[0]
    third = start_server()
    with pytest.raises(openai.AuthenticationError):
        third.client(known["key"]).models.list()
    assert third.client(fresh).models.list().data
    assert openai.OpenAI(base_url=third.ready["base_url"] + "/v1", admin_api_key=admin, api_key="").admin
    assert third.verify_books()["ok"]


def test_a_rotation_that_was_interrupted_is_finished_by_the_next(stopped, start_server, tmp_path):
    home = tmp_path / "home"
    known = stopped.copied_to(home)
    current, following = home / "secrets/master.key", home / "secrets/master.key.next"

    def before_the_commit() -> None:
        following.write_bytes(b"n" * 32)

    def behind_it() -> None:
        """The database has the new key, and the file has the old one."""
        old = current.read_bytes()
        assert run("secrets", "rotate-master-key", home=home).returncode == 0
        current.rename(following)
        current.write_bytes(old)

    for interrupt in (before_the_commit, behind_it, before_the_commit):
        interrupt()
        refused = run("up", "--port", "0", home=home)
        assert refused.returncode == 1
        assert "was interrupted" in refused.stderr
        done = run("secrets", "rotate-master-key", home=home)
        assert done.returncode == 0, done.stderr
        assert not following.exists()
    server = start_server()
    still_works(server, known)
    assert server.verify_books()["ok"]


def test_the_home_of_an_earlier_version_is_upgraded_with_clean_books(start_server, tmp_path):
    """`tests/old_home` was written by the code of 2026-11-24 (commit 6fa5e0ca, schema 0016) and stopped: a tenant with four
    requests and a batch of one line, a budget and a webhook. Logs, Redis' files, locks and ballast are left out.
    """
    known = json.loads((OLD_HOME / "known.json").read_text())
    with tarfile.open(OLD_HOME / "schema-0016.tar.xz") as packed:
        packed.extractall(tmp_path / "home", filter="data")
    entries = "SELECT request_id, tenant_id, uncached, cache_read, output, charge FROM ledger_entry ORDER BY request_id"
    with sqlite3.connect(tmp_path / "home/headgate.db") as connection:
        before = connection.execute(entries).fetchall()
        assert connection.execute("SELECT version_num FROM alembic_version").fetchone() == ("0016",)
    connection.close()
    assert len(before) == 5
    file = tmp_path / "old.tar"
    assert run("backup", str(file), home=tmp_path / "home").returncode == 0
    old = run("up", "--port", "0", "--no-migrate", home=tmp_path / "home")
    assert old.returncode == 1
    assert "headgate migrate" in old.stderr
    server = start_server()
    assert server.sql(entries) == before
    client = server.client(known["key"])
    assert client.completions.create(model=server.model, prompt="def g(", max_tokens=4).usage.completion_tokens
    assert known["webhook"] in {hook["id"] for hook in server.admin("GET", "/admin/v1/webhooks")["data"]}
    assert known["budget"] in {budget["id"] for budget in server.admin("GET", "/admin/v1/budgets")["data"]}
    assert server.verify_books()["ok"]
    restored = run("restore", str(file), home=tmp_path / "second")
    assert restored.returncode == 0, restored.stdout + restored.stderr
