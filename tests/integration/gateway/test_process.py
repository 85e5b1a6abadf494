"""`python -m gateway`: the contract its supervisor builds on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from byte_model import write_byte_model
from fakes import ScriptedWorker
from gateways import MODEL, prepare_home
from load import stretched

from accounting.database import sealing
from accounting.database.db import Database
from accounting.requests import idempotency_store
from gateway.base.home import Home
from gateway.base.settings import CannotStartYet, SettingsError, load
from gateway.cli import doctor_checks
from gateway.cli.finding import Installation
from gateway.cli.gateway_probes import GatewayProbes
from gateway.cli.model import ServedModel, WantedModel
from gateway.server import serve
from workers.process import file_systems

pytestmark = pytest.mark.rest

ANONYMOUS = ["rw-p", "00000000", "00:00", "0"]


def environment(home: Path, redis_url: str, **more: str) -> dict[str, str]:
    models = {MODEL: {"path": str(write_byte_model(home / "model"))}}
    ours = {
        "HEADGATE_HOME": str(home),
        "HEADGATE_SLOT": "0",
        "HEADGATE_BIND": "127.0.0.1:0",
        "HEADGATE_REDIS_URL": redis_url,
        "HEADGATE_MODELS": json.dumps(models),
        "HEADGATE_DRAIN_GRACE_S": "0.2",
        "HEADGATE_DRAIN_S": "2",
        "HEADGATE_MODEL": "of another process",
        "HEADGATE_LIMITER_TIMEOUT_S": os.environ["HEADGATE_LIMITER_TIMEOUT_S"],
    }
    return {name: value for name, value in os.environ.items() if not name.startswith("HEADGATE_")} | ours | more


def run_to_end(environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gateway"], env=environ, capture_output=True, text=True, timeout=20, check=False
    )


def inheritable() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.set_inheritable(True)
        yield sock


listener = pytest.fixture(inheritable, name="listener")
ops_listener = pytest.fixture(inheritable, name="ops_listener")


def start(environ: dict[str, str], *fds: int, stderr: Any = subprocess.PIPE) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "gateway"], env=environ, pass_fds=fds, stderr=stderr)


async def ops(home: Path, path: str, slot: int = 0, method: str = "GET") -> tuple[int, Any]:
    connector = aiohttp.UnixConnector(str(home / "run" / f"gateway-{slot}.sock"))
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.request(method, f"http://ops{path}") as answer,
    ):
        data = await answer.read()
        return answer.status, json.loads(data) if data.startswith(b"{") else data


async def ready(home: Path, slot: int = 0, **expected: Any) -> Any:
    """Until nothing is missing but, perhaps, a worker."""
    deadline = time.monotonic() + stretched(60)
    while time.monotonic() < deadline:
        try:
            status, body = await ops(home, "/readyz", slot)
        except (OSError, aiohttp.ClientError):
            status, body = 0, {}
        missing = [check["name"] for check in body.get("checks", ()) if "state" in check]
        serves = status == 200 or missing == [f"model:{MODEL}"]
        if serves and all(body.get(name) == value for name, value in expected.items()):
            return body
        await asyncio.sleep(0.05)
    raise AssertionError(f"not ready: {status} {body}")


async def drains(home: Path, slot: int) -> None:
    """Waits until `/readyz` says so, which it does from the signal to the end of the grace."""
    deadline = time.monotonic() + stretched(60)
    while (answer := await ops(home, "/readyz", slot))[1]["status"] != "draining":
        assert time.monotonic() < deadline, answer
        await asyncio.sleep(0.02)
    assert answer[0] == 503


@asynccontextmanager
async def one_process(home: Path, redis_url: str, *fds: int, **environ: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Over books of its own, ready."""
    await prepare_home(home, f"sqlite+aiosqlite:///{home / 'headgate.db'}")
    process = start(environment(home, redis_url, **environ), *fds)
    try:
        await ready(home)
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_no_full_collection_goes_through_what_was_imported(tmp_path: Path, redis_url: str) -> None:
    async with one_process(tmp_path, redis_url) as process:
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(process.communicate, timeout=stretched(15))
    (line,) = [line for line in log.decode().splitlines() if "gateway_ready" in line]
    assert json.loads(line)["num_frozen"] > 50_000


async def test_its_loop_beats_for_whoever_started_it(tmp_path: Path, redis_url: str) -> None:
    fd, has_beaten = os.eventfd(0), asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, has_beaten.set)
    async with one_process(tmp_path, redis_url, fd, HEADGATE_HEARTBEAT_FD=str(fd)):
        await asyncio.wait_for(has_beaten.wait(), 30)
    asyncio.get_running_loop().remove_reader(fd)
    os.close(fd)


async def test_p3_threads_share_what_they_allocate_from(tmp_path: Path, redis_url: str) -> None:
    """P3: each thread's own arena kept what its largest transaction took. One begins at a multiple of 64 MiB."""
    async with one_process(tmp_path, redis_url) as process:
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    fields = [line.split() for line in maps]
    starts = [int(words[0].split("-")[0], 16) for words in fields if words[1:] == ANONYMOUS]
    assert 1 <= sum(start % (64 << 20) == 0 for start in starts) <= 2


async def test_two_processes_share_a_listener_report_workers_and_drain_on_sigterm(
    tmp_path: Path, redis_url: str, listener: socket.socket, ops_listener: socket.socket
) -> None:
    keys = await prepare_home(tmp_path, f"sqlite+aiosqlite:///{tmp_path / 'headgate.db'}")
    fd = listener.fileno()
    ops_fd = ops_listener.fileno()
    more = {"HEADGATE_LISTEN_FD": str(fd), "HEADGATE_OPS_FD": str(ops_fd), "HEADGATE_DRAIN_GRACE_S": "4"}
    processes = [
        start(environment(tmp_path, redis_url, HEADGATE_SLOT=str(slot), **more), fd, ops_fd) for slot in (0, 1)
    ]
    ops_url = f"http://127.0.0.1:{ops_listener.getsockname()[1]}"
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        for slot in (0, 1):
            await ready(tmp_path, slot, workers={})
        async with ScriptedWorker(tmp_path / "w.sock", redis_url=redis_url, tokens_per_s=100):
            for slot in (0, 1):
                await ready(tmp_path, slot, workers={MODEL: 1}, draining=[])
            headers = {"authorization": f"Bearer {keys.api_key}"}
            body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 50}
            async with aiohttp.ClientSession(url, headers=headers) as session:
                async with session.get("/metrics") as answer:
                    assert answer.status == 404, "S6"
                async with session.get(f"{ops_url}/metrics") as answer:
                    page = await answer.text()
                assert 'headgate_gateway_up{gateway="0"} 1.0' in page
                assert 'headgate_gateway_up{gateway="1"} 1.0' in page
                running = asyncio.create_task(_post(session, body))
                await asyncio.sleep(0.2)
                for process in processes:
                    process.send_signal(signal.SIGTERM)
                await asyncio.gather(*(drains(tmp_path, slot) for slot in (0, 1)))
                assert await running == 200  # accepted before the drain, ended within it
            for process in processes:
                assert await asyncio.to_thread(process.wait, stretched(15)) == 0
    finally:
        for process in processes:
            process.kill()
            process.communicate()


async def _post(session: aiohttp.ClientSession, body: Any) -> int:
    async with session.post("/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def test_post_drain_on_the_ops_socket_makes_it_unready(tmp_path: Path, redis_url: str) -> None:
    async with one_process(tmp_path, redis_url) as process:
        assert await ops(tmp_path, "/drain", method="POST") == (202, {"status": "draining"})
        assert (await ops(tmp_path, "/readyz"))[0] == 503
        assert (await ops(tmp_path, "/livez"))[0] == 200
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, stretched(15)) == 0


async def test_s6_the_operators_listener_shows_and_takes_no_orders(
    tmp_path: Path, redis_url: str, ops_listener: socket.socket
) -> None:
    """It answers this machine's programs: neither a page in a browser, which asks by another name, nor a proxy."""
    await prepare_home(tmp_path, f"sqlite+aiosqlite:///{tmp_path / 'headgate.db'}")
    fd = ops_listener.fileno()
    process = start(environment(tmp_path, redis_url, HEADGATE_OPS_FD=str(fd)), fd)
    try:
        await ready(tmp_path)
        url = f"http://127.0.0.1:{ops_listener.getsockname()[1]}"
        async with aiohttp.ClientSession(url) as session:

            async def status(method: str, path: str, **headers: str) -> int:
                async with session.request(method, path, headers=headers) as answer:
                    return answer.status

            # Nobody serves the model here.
            for path, expected in (("/livez", 200), ("/readyz", 503), ("/metrics", 200)):
                assert await status("GET", path) == expected
                assert await status("HEAD", path) == expected
                assert await status("GET", path, host="example.org") == 404
                assert await status("GET", path, **{"x-forwarded-for": "127.0.0.1"}) == 404
            assert await status("POST", "/drain") == 404
            assert (await ops(tmp_path, "/readyz"))[1]["status"] == "unready", "not draining"
    finally:
        process.kill()
        process.communicate()


async def test_s6_without_an_address_the_operators_listener_is_on_loopback_and_named_in_the_log(
    tmp_path: Path, redis_url: str
) -> None:
    async with one_process(tmp_path, redis_url) as process:
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(process.communicate, timeout=stretched(15))
    (line,) = [line for line in log.decode().splitlines() if "gateway_ready" in line]
    assert json.loads(line)["ops_url"].startswith("http://127.0.0.1:")


@pytest.mark.parametrize("networks", ["", "10.0.0.0/8"])
async def test_a_bind_that_others_reach_without_a_proxy_is_warned_of(
    tmp_path: Path, redis_url: str, networks: str
) -> None:
    more = {"HEADGATE_BIND": "0.0.0.0:0", "HEADGATE_TRUSTED_NETWORKS": networks}
    async with one_process(tmp_path, redis_url, **more) as process:
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(process.communicate, timeout=stretched(15))
    lines = [line for line in log.decode().splitlines() if "keys_in_the_clear" in line]
    assert len(lines) == (0 if networks else 1)
    assert all("put a proxy with TLS in front" in json.loads(line)["msg"] for line in lines)


async def test_what_stops_the_start_is_one_sentence(tmp_path: Path, redis_url: str) -> None:
    """Two of them as a user sees them; the others are in tests/unit/gateway/test_settings.py and below."""
    base = environment(tmp_path, redis_url)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"127.0.0.1:{taken.getsockname()[1]}"
        await prepare_home(tmp_path, f"sqlite+aiosqlite:///{tmp_path / 'headgate.db'}")
        for more, words in (
            ({"HEADGATE_SLOTT": "1"}, "HEADGATE_SLOTT"),
            ({"HEADGATE_BIND": bind}, "Headgate cannot listen on"),
            ({"HEADGATE_OPS_BIND": bind}, "Headgate cannot listen on"),
        ):
            result = await asyncio.to_thread(run_to_end, base | more)
            assert result.returncode != 0
            [line] = [line for line in result.stderr.splitlines() if not line.startswith("{")]
            assert line.startswith("headgate gateway: ")
            assert words in line


async def test_a_home_that_cannot_be_served_is_named(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = environment(tmp_path, redis_url)

    async def sentence(**more: str) -> str:
        ours = {name: value for name, value in (base | more).items() if name.startswith("HEADGATE_")}
        with pytest.raises(SettingsError) as found:
            await serve(load(ours))
        return str(found.value)

    assert "key file" in await sentence()
    await prepare_home(tmp_path, f"sqlite+aiosqlite:///{tmp_path / 'headgate.db'}")
    broken = json.dumps({"m": {"path": str(tmp_path / "nothing")}})
    assert "Cannot serve the model m" in await sentence(HEADGATE_MODELS=broken)
    assert "database" in await sentence(HEADGATE_DATABASE_URL="oracle://x")
    with monkeypatch.context() as patched:
        mounts = tmp_path / "mounts"
        mounts.write_text(f"server:/x {tmp_path / 'state'} nfs4 rw 0 0\n")
        patched.setattr(file_systems, "MOUNTS", mounts)
        assert "is on nfs4, a network file system. Use a local disk" in await sentence()
    (tmp_path / "secrets" / "pepper").write_bytes(b"short")
    assert "too short" in await sentence()


async def test_a_master_key_of_another_installation_is_refused(tmp_path: Path, redis_url: str) -> None:
    """A tenant's texts would be encrypted under it, and every other host would fail to read them."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'headgate.db'}"
    keys = await prepare_home(tmp_path, url)
    installation = Installation(Home(tmp_path), {})
    database = Database(url)
    async with database.write() as conn:
        await sealing.data_key(conn, Home(tmp_path).read_secret("master.key"), keys.tenant_id, 1)
    await database.close()
    assert [one.state for one in await asyncio.to_thread(list, doctor_checks.database(installation))] == ["ok"]
    (tmp_path / "secrets" / "master.key").write_bytes(b"another key of thirty-two bytes.")
    ours = {name: value for name, value in environment(tmp_path, redis_url).items() if name.startswith("HEADGATE_")}
    with pytest.raises(SettingsError, match="not the one with which this database was written: copy secrets/"):
        await serve(load(ours))
    (tmp_path / "secrets" / "master.key.next").write_bytes(b"the key that is in use already..")
    with pytest.raises(SettingsError, match="was interrupted: run `headgate secrets rotate-master-key` again"):
        await serve(load(ours))
    (tmp_path / "secrets" / "master.key.next").unlink()
    _, found = await asyncio.to_thread(list, doctor_checks.database(installation))
    assert (found.name, found.state, found.fix) == (
        *("secrets", "failing"),
        "Copy secrets/ from another host or the backup.",
    )


@pytest.mark.parametrize(
    ("database_url", "told"),
    [
        ("sqlite+aiosqlite:///{home}/empty.db", "run `headgate migrate`"),
        ("sqlite+aiosqlite:///{home}/away/books.db", "cannot be used"),
        ("postgresql+psycopg://u:secret@127.0.0.1:1/db", "cannot be used"),
    ],
    ids=["not migrated", "not mounted", "nobody listens"],
)
async def test_a_database_that_may_come_later_is_no_setting(
    tmp_path: Path, redis_url: str, database_url: str, told: str
) -> None:
    """A supervisor does not start a gateway again that ends with 78: after a boot in the wrong order it would stay down."""
    await prepare_home(tmp_path, f"sqlite+aiosqlite:///{tmp_path / 'headgate.db'}")
    sqlite3.connect(tmp_path / "empty.db").close()
    base = environment(tmp_path, redis_url, HEADGATE_DATABASE_URL=database_url.format(home=tmp_path))
    ours = {name: value for name, value in base.items() if name.startswith("HEADGATE_")}
    with pytest.raises(CannotStartYet, match=told) as found:
        await serve(load(ours))
    assert "secret" not in str(found.value)
    ended = await asyncio.to_thread(run_to_end, base)
    assert ended.returncode == 1, ended.stderr
    assert [line for line in ended.stderr.splitlines() if not line.startswith("{")] == [
        f"headgate gateway: {found.value}"
    ]


async def test_a_slot_that_runs_on_another_host_stays_with_it(tmp_path: Path, redis_url: str) -> None:
    """The journal's lock guards one machine. What the running gateway has in SQL, such as its running keys, stays."""
    here, there = tmp_path / "here", tmp_path / "there"
    url = f"sqlite+aiosqlite:///{here / 'headgate.db'}"
    of_here, of_there = (environment(home, redis_url, HEADGATE_DATABASE_URL=url) for home in (here, there))
    keys, _ = [await prepare_home(home, url) for home in (here, there)]
    database = Database(url)
    first = start(of_here)
    try:
        await ready(here)
        async with database.write() as conn:
            taken = {"fingerprint": b"f", "request_id": "req_1", "slot": 0, "now": int(time.time())}
            assert await idempotency_store.take(conn, keys.tenant_id, "k", **taken) is None
        refused = await asyncio.to_thread(run_to_end, of_there)
        assert (refused.returncode, refused.stderr.splitlines()[-1]) == (
            os.EX_CONFIG,
            "headgate gateway: Slot 0 is in use: a gateway of another host or home runs in it, or did 10 s ago.",
        )
        assert not (there / "state").exists(), "who is refused leaves nothing"
        async with database.write() as conn:
            assert await idempotency_store.take(conn, keys.tenant_id, "k", **taken) is not None, (
                "the key is still taken"
            )
        first.kill()
        first.communicate()
        first = start(of_here)
        await ready(here)  # its own home goes on at once after a kill
        first.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(first.wait, stretched(15)) == 0
        second = start(of_there)
        try:
            await ready(there)  # the slot was given up
        finally:
            second.kill()
            second.communicate()
    finally:
        await database.close()
        first.kill()
        first.communicate()


async def test_a_hangup_makes_a_gateway_read_the_models_of_its_file_again(tmp_path: Path, redis_url: str) -> None:
    home, file, log = tmp_path / "home", tmp_path / "headgate.toml", tmp_path / "log"
    home.mkdir()
    environ = environment(home, redis_url, HEADGATE_MODELS_FILE=str(file))
    model = f'path = "{home / "model"}"\n'
    file.write_text(f"drain_s = 2\n[models.{MODEL}]\n{model}replicas = 2\n")
    await prepare_home(home, f"sqlite+aiosqlite:///{home / 'headgate.db'}")
    with log.open("wb") as written:
        process = start(environ, stderr=written)
    try:
        await ready(home)
        file.write_text(file.read_text() + f"[models.another]\n{model}")
        process.send_signal(signal.SIGHUP)
        await until_models(home, {MODEL, "another"})
        file.write_text("[models.broken")
        process.send_signal(signal.SIGHUP)
        await until_logged(log, "headgate.toml is not TOML")
        await until_models(home, {MODEL, "another"})
        await refuses_a_broken_directory(home, file, log, process)
        file.write_text(f"[models.another]\n{model}")
        process.send_signal(signal.SIGHUP)
        await until_models(home, {"another"})
    finally:
        process.kill()
        process.wait()


async def refuses_a_broken_directory(home: Path, file: Path, log: Path, process: subprocess.Popen[bytes]) -> None:
    """The gateway keeps what it had, and whoever asks whether it has read the new directory hears that it has not."""
    probes, path = GatewayProbes(Home(home), 1), home / "model"
    broken = Path(shutil.copytree(path, home / "broken"))
    (broken / "chat_template.jinja").write_text("{% if")
    old, new = [(ServedModel(MODEL, one, WantedModel(str(one))),) for one in (path, broken)]
    file.write_text(f'[models.{MODEL}]\npath = "{path}"\n')
    process.send_signal(signal.SIGHUP)
    await until_models(home, {MODEL})
    assert await probes.knows(0, old)
    file.write_text(f'[models.{MODEL}]\npath = "{broken}"\n')
    process.send_signal(signal.SIGHUP)
    await until_logged(log, "does not compile")
    assert (await probes.knows(0, new), await probes.knows(0, old)) == (False, True)


async def until_logged(log: Path, text: str) -> None:
    deadline = time.monotonic() + stretched(20)
    while text not in log.read_text():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)


async def until_models(home: Path, expected: set[str]) -> None:
    deadline = time.monotonic() + stretched(20)
    while True:
        _, body = await ops(home, "/readyz")
        names = [check["name"] for check in body["checks"] if check["name"].startswith("model:")]
        if {name.removeprefix("model:") for name in names} == expected:
            return
        assert time.monotonic() < deadline, names
        await asyncio.sleep(0.05)
