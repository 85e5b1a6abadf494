"""A gateway that answers deterministically, a Redis of its own, and the real jobs process beside them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
import redis
from aiohttp import web
from gateways import RunningGateway
from load import stretched
from migrated import migrated_database

from accounting.access import api_keys, principals
from accounting.batches import batches, files
from accounting.batches.batches import BatchInfo
from accounting.batches.file_store import FileStore
from accounting.database import sealing
from accounting.database.db import Database
from accounting.prices import prices
from accounting.requests import idempotency_store
from accounting.tenants import tenants
from accounting.values.types import ENDED_BATCH, Charge, Posting, Rates, Usage

PEPPER, MASTER = b"p" * 32, b"m" * 32
MODEL = "demo"
ENDPOINT = "/v1/chat/completions"


@dataclass
class TestGateway:
    """Speaks as the real one: credential, Idempotency-Key, stored replies. What a line's first message says decides."""

    __test__ = False

    database: Database
    url: str = ""
    delay_s: float = 0.0
    num_runs: Counter = field(default_factory=Counter)
    """Charged runs per line."""
    replayed: Counter = field(default_factory=Counter)
    seen: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    tries: Counter = field(default_factory=Counter)
    kinds: set[str] = field(default_factory=set)
    refuse_all: tuple[int, str, dict[str, str]] | None = None

    def forget(self) -> None:
        self.delay_s, self.refuse_all = 0.0, None
        for seen in (self.num_runs, self.replayed, self.seen, self.tries, self.kinds):
            seen.clear()

    async def chat(self, request: web.Request) -> web.StreamResponse:
        async with self.database.read() as conn:
            principal = await principals.resolve(
                conn, PEPPER, request.headers["authorization"].removeprefix("Bearer "), int(time.time())
            )
        if principal is None:
            return refusal(401, "invalid_api_key")
        self.kinds.add(principal.kind)
        key = request.headers["idempotency-key"]
        line_no = int(key.rpartition(":")[2])
        assert key == idempotency_store.line_key(principal.batch_id, line_no)
        self.seen.append((line_no, dict(request.headers)))
        body = await request.json()
        # Runs to its end, whatever becomes of the connection.
        return await asyncio.shield(asyncio.ensure_future(self._answer(principal, key, line_no, body)))

    async def _answer(self, principal, key: str, line_no: int, body: dict[str, Any]) -> web.Response:
        word, _, rest = body["messages"][-1]["content"].partition(" ")
        self.tries[line_no] += 1
        if self.refuse_all:
            status, code, headers = self.refuse_all
            return refusal(status, code, headers)
        if word == "bad":
            return refusal(400, "invalid_value")
        if word == "broken" or (word == "flaky" and self.tries[line_no] < 3):
            return refusal(500, "internal_error")
        if word == "busy" and self.tries[line_no] < 3:
            return refusal(503, "overloaded", {"retry-after": "1", "retry-after-ms": "30"})
        request_id = f"req_{line_no}_{self.tries[line_no]}_{principal.batch_id}"
        line = (principal.batch_id, line_no)
        try:
            async with self.database.write() as conn:
                known = await idempotency_store.take(
                    conn,
                    principal.tenant_id,
                    key,
                    fingerprint=b"f",
                    request_id=request_id,
                    slot=0,
                    now=int(time.time()),
                    line=line,
                )
        except idempotency_store.KeyClosed:
            return refusal(409, "batch_line_ended", {"x-should-retry": "false"})
        if known is not None and known.stored is None:
            return refusal(409, "idempotency_in_progress", {"retry-after": "1", "retry-after-ms": "50"})
        async with self.database.write() as conn:
            data_key = await sealing.data_key(conn, MASTER, principal.tenant_id, 0)
        if known is not None:
            self.replayed[line_no] += 1
            content = sealing.unseal(data_key, known.stored.body, key.encode())
            return answer(content, known.stored.request_id)
        await asyncio.sleep(float(rest) if word == "slow" else self.delay_s)
        usage = Usage(cache_read=16, uncached=4, output=len(rest))
        content = msgspec.json.encode(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "model": body["model"],
                "choices": [
                    {"index": 0, "message": {"role": "assistant", "content": rest[::-1]}, "finish_reason": "stop"}
                ],
                "usage": {
                    "prompt_tokens": 20,
                    "completion_tokens": len(rest),
                    "total_tokens": 20 + len(rest),
                    "prompt_tokens_details": {"cached_tokens": 16},
                },
            }
        )
        async with self.database.write() as conn:
            stored = await idempotency_store.store(
                conn,
                principal.tenant_id,
                key,
                request_id=request_id,
                status=200,
                body=sealing.seal(data_key, content, key.encode()),
                postings=[posting(principal, request_id, usage, line)],
            )
        if not stored:
            return refusal(503, "batch_cancelled", {"x-should-retry": "false"})
        self.num_runs[line_no] += 1
        return answer(content, request_id)


def posting(principal, request_id: str, usage: Usage, line: tuple[str, int]) -> Posting:
    return Posting(
        kind="settle",
        request_id=request_id,
        outcome="ok",
        tenant_id=principal.tenant_id,
        key_id=principal.key_id,
        model=MODEL,
        root="r",
        tier="batch",
        price_version="default@1",
        currency="USD",
        opened_at_ms=1,
        ended_at_ms=2,
        usage=usage,
        charge=Charge(0, 0, 0, 0, 0),
        batch_id=line[0],
        line_no=line[1],
    )


def answer(content: bytes, request_id: str) -> web.Response:
    return web.Response(body=content, content_type="application/json", headers={"x-request-id": request_id})


def refusal(status: int, code: str, headers: dict[str, str] | None = None) -> web.Response:
    error = {"error": {"message": f"{code}.", "type": "x", "param": None, "code": code}}
    return web.json_response(error, status=status, headers={"x-request-id": "req_no", **(headers or {})})


@dataclass
class Home:
    path: Path
    url: str
    database: Database
    tenant_id: str
    key_id: str
    key: str

    @property
    def store(self) -> FileStore:
        return FileStore(self.path / "files")

    async def upload(self, content: bytes, purpose: str = "batch") -> str:
        async with self.database.write() as conn:
            data_key = await sealing.data_key(conn, MASTER, self.tenant_id, 0)
            writer = self.store.create(data_key)
            writer.write(content)
            sha256 = writer.finish()
            info = await files.create(
                conn,
                self.tenant_id,
                purpose=purpose,
                name="in.jsonl",
                num_bytes=len(content),
                sha256=sha256,
                storage_key=writer.storage_key,
                now=int(time.time()),
            )
        return info.id

    async def submit(self, content: bytes | list[str], **options: Any) -> str:
        if not isinstance(content, bytes):
            content = b"".join(line(i, text) for i, text in enumerate(content))
        file_id = await self.upload(content)
        async with self.database.write() as conn:
            batch = await batches.create(
                conn,
                self.tenant_id,
                self.key_id,
                input_file_id=file_id,
                endpoint=ENDPOINT,
                completion_window="24h",
                now=int(time.time()),
                **options,
            )
        return batch.id

    async def get(self, batch_id: str) -> BatchInfo:
        async with self.database.read() as conn:
            return await batches.get(conn, self.tenant_id, batch_id)

    async def wait(self, batch_id: str, *states: str, limit_s: float = 60.0) -> BatchInfo:
        deadline = time.monotonic() + stretched(limit_s)
        while True:
            batch = await self.get(batch_id)
            if batch.state in (states or ENDED_BATCH):
                return batch
            assert time.monotonic() < deadline, batch
            await asyncio.sleep(0.05)

    async def until(self, condition: Callable[[], bool], limit_s: float = 40.0) -> None:
        deadline = time.monotonic() + stretched(limit_s)
        while not condition():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    async def read(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        async with self.database.write() as conn:
            info = await files.get(conn, self.tenant_id, file_id, int(time.time()))
            data_key = await sealing.data_key(conn, MASTER, self.tenant_id, 0)
        reader = self.store.open(info.storage_key, data_key)
        content = b"".join(reader.parts())
        reader.close()
        assert len(content) == info.num_bytes
        return [json.loads(line) for line in content.splitlines()]

    async def results(self, batch: BatchInfo) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        return await self.read(batch.output_file_id), await self.read(batch.error_file_id)


def line(number: int, text: str, **changes: Any) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    value = {"custom_id": f"line-{number}", "method": "POST", "url": ENDPOINT, "body": body} | changes
    return json.dumps(value).encode() + b"\n"


def shared(function: Callable[..., Any]) -> Any:
    """One for all tests of a module: starting the jobs process takes longer than most tests."""
    return pytest_asyncio.fixture(scope="module", loop_scope="module")(function)


@shared
async def home(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Home]:
    tmp_path = tmp_path_factory.mktemp("jobs")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/pepper").write_bytes(PEPPER)
    (tmp_path / "secrets/master.key").write_bytes(MASTER)
    url = f"sqlite+aiosqlite:///{tmp_path / 'headgate.db'}"
    await migrated_database(url)
    database = Database(url)
    now = int(time.time())
    async with database.write() as conn:
        tenant = await tenants.create(conn, "one", now=now)
        key = await api_keys.create(conn, PEPPER, tenant_id=tenant.id, now=now)
        rates = {"interactive": Rates(1, 1, 1, 1), "batch": Rates(1, 1, 1, 1)}
        await prices.bootstrap(conn, {MODEL: rates}, now * 1000 - 1000)
    yield Home(tmp_path, url, database, tenant.id, key.info.id, key.value)
    await database.close()


@shared
async def one_gateway(home: Home) -> AsyncIterator[TestGateway]:
    made = TestGateway(home.database)
    app = web.Application(client_max_size=2**24)
    app.router.add_post(ENDPOINT, made.chat)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    yield made
    await runner.cleanup()


@dataclass
class Jobs:
    """`python -m workers.jobs` with every time shortened to a twentieth."""

    home: Path
    env: dict[str, str]
    process: subprocess.Popen | None = None

    def start(self) -> None:
        log = (self.home / "jobs.log").open("ab")
        self.process = subprocess.Popen([sys.executable, "-m", "workers.jobs"], env=self.env, stdout=log, stderr=log)
        log.close()

    def children(self) -> list[int]:
        """The Celery worker's prefork children."""
        return [pid for worker in _children(self.process.pid) for pid in _children(worker)]

    def worker(self) -> int:
        (pid,) = _children(self.process.pid)
        return pid

    def stop(self, number: int = signal.SIGTERM) -> float:
        started = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(number)
            self.process.wait(stretched(30))
        return time.monotonic() - started

    def log(self) -> str:
        return (self.home / "jobs.log").read_text()


def _children(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


@pytest.fixture
def gateway(one_gateway: TestGateway) -> TestGateway:
    """As if new."""
    one_gateway.forget()
    return one_gateway


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Redis that a test may empty or kill."""
    from conftest import wait_for_socket

    from gateway.cli.embedded import find_server, server_command

    tmp_path = tmp_path_factory.mktemp("broker")
    path = tmp_path / "broker.sock"
    with (tmp_path / "broker.log").open("wb") as log:
        process = subprocess.Popen(
            server_command(find_server(), tmp_path, path), stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    wait_for_socket(path)
    yield path
    process.terminate()
    process.wait(10)


@shared
async def stopped_jobs(home: Home, one_gateway: TestGateway, broker: Path) -> AsyncIterator[Jobs]:
    """Not started yet: a test may change its environment first."""
    env = {
        **os.environ,
        "HEADGATE_HOME": str(home.path),
        "HEADGATE_URL": one_gateway.url,
        "HEADGATE_BROKER_URL": f"redis+socket://{broker}?virtual_host=1",
        "HEADGATE_TEST_TIME_SCALE": "0.05",
        "HEADGATE_JOBS_CHUNK_LINES": "16",
        "PYTHONFAULTHANDLER": "1",
        "AUTOSCALE_KEEPALIVE": "2",  # Celery's seconds from the last work to the end of a child
    }
    made = Jobs(home.path, env)
    yield made
    if made.process is not None and made.process.poll() is None:
        await asyncio.to_thread(made.stop)
    for pid in made.children() if made.process else []:
        os.kill(pid, signal.SIGKILL)


@shared
async def jobs(stopped_jobs: Jobs) -> Jobs:
    stopped_jobs.start()
    return stopped_jobs


@pytest.fixture
def broker_client(broker: Path) -> Iterator[redis.Redis]:
    with redis.Redis(unix_socket_path=str(broker), db=1) as client:
        yield client


@pytest.fixture
def jobs_process(gateway: RunningGateway, broker_url: str) -> Iterator[subprocess.Popen[bytes]]:
    """The jobs of a whole gateway."""
    env = {
        **os.environ,
        "HEADGATE_HOME": str(gateway.settings.home),
        "HEADGATE_URL": gateway.url,
        "HEADGATE_BROKER_URL": broker_url,
        "HEADGATE_TEST_TIME_SCALE": "0.05",
    }
    with (gateway.settings.home / "jobs.log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-m", "workers.jobs"], env=env, stdout=log, stderr=log)
    yield process
    process.send_signal(signal.SIGTERM)
    process.wait(stretched(40))
