"""A gateway's life with requests of all kinds, and then a search for their secrets and texts in all that it wrote."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sqlite3
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis.asyncio
from fakes import ScriptedRunner, ScriptedWorker
from gateways import MODEL, PEPPER, RunningGateway, running_gateway, until
from otlp import Collector
from provider import KEY, Provider, Script, declared, price, running_provider
from sqlalchemy import text

from accounting.access import credentials
from gateway.base.app_keys import DATABASE
from gateway.telemetry.metrics import METRICS
from workers.process import logs
from workers.process.metrics_text import OPENMETRICS

pytestmark = pytest.mark.rest

PROMPT, SAID, FILE = "canary-prompt-2b81", "canary-answer-77c0", "canary-file-09d5"
LABEL = "canary-label-4e6a"
"""The client's own words for its request. The database has them, for the tenant to search by."""
FOREIGN = "sk-proj-canaryOfAnotherProvider0123456789"
STORED = "sk-stored-canary-upstream-credential"
CHAT = "/v1/chat/completions"
OWN_IDS = ("x-request-id", "x-client-request-id")
"""Headers that name the client's own id of the request. It is logged and sent back, without what is a key of ours."""
HEADS = (
    *OWN_IDS,
    "authorization",
    "x-goog-api-key",
    "x-headgate-quote",
    "openai-organization",
    "openai-project",
    "anthropic-version",
    "traceparent",
    "tracestate",
    "baggage",
    "user-agent",
    "referer",
    "origin",
    "cookie",
    "x-forwarded-for",
    "accept",
)
"""Headers in which a key may stand by mistake."""


@pytest.fixture
async def worker(tmp_path: Path, redis_url: str) -> AsyncIterator[ScriptedWorker]:
    runner = ScriptedRunner()
    runner.says = lambda prompt: SAID
    journal = tmp_path / "home" / "state" / "worker-0"
    async with ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=journal, runner=runner) as worker:
        yield worker


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with running_provider() as found:
        yield found


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a process writes that is set to tell all."""
    written, root = io.StringIO(), logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setenv(logs.FORM, "json")
    monkeypatch.setattr(logs.Repeats, "filter", lambda self, record: True)
    logs.configure("DEBUG")
    yield written
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


class Life:
    """The requests, and what they were told of failures: of a path or an id that the client itself named, no more."""

    def __init__(self, gateway: RunningGateway) -> None:
        self.gateway = gateway
        self.errors: list[str] = []
        self.statuses: set[int] = set()

    async def ask(
        self, key: str, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """A body that is no text is sent as JSON."""
        data = body if isinstance(body, str | bytes | aiohttp.FormData | None) else json.dumps(body)
        json_head = {} if isinstance(body, aiohttp.FormData | None) else {"content-type": "application/json"}
        async with (
            self.gateway.session(key) as session,
            session.request(method, path, data=data, headers=json_head | (headers or {})) as answer,
        ):
            said = await answer.text()
        self.statuses.add(answer.status)
        if answer.status >= 400:
            named = [path.strip("/"), *(value for name, value in (headers or {}).items() if name in OWN_IDS)]
            told = f"{said} {dict(answer.headers)}"
            for one in named:
                told = told.replace(one, "")
            self.errors.append(told)
        try:
            return answer.status, json.loads(said)
        except ValueError:
            return answer.status, said


def chat(content: str = PROMPT, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 40} | more


async def test_no_key_and_no_text_is_in_anything_that_a_gateway_wrote(
    tmp_path: Path,
    redis_url: str,
    worker: ScriptedWorker,
    provider: Provider,
    collector: Collector,
    log: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setattr("gateway.resources.EVERY_S", 0.1)
    home = tmp_path / "home"
    async with running_gateway(home, redis_url, upstreams={"mock": declared(provider)}, trace_ratio=1.0) as gateway:
        await gateway.workers(1)
        await price(gateway, "bought", "vectors")
        life = Life(gateway)
        secrets = {
            "prompt": PROMPT,
            "answer": SAID,
            "file": FILE,
            "label": LABEL,
            "id in a key": credentials.parse(gateway.keys.api_key).public_id,
            "key of another provider": FOREIGN,
            "credential of an upstream": KEY,
            "stored credential": STORED,
            "tenant's key": gateway.keys.api_key,
            "operator's key": gateway.keys.admin_key,
            "wrong key": credentials.generate("live"),
            "credential of a batch": credentials.batch_credential(PEPPER, "batch_0123456789"),
            "credential of a run": credentials.run_credential(PEPPER, "resp_0123456789"),
            "pepper": PEPPER.decode(),
            "master key": "m" * 32,
        }
        await rightly(life, secrets)
        await with_keys_in_wrong_places(life, secrets)
        await refused(life, secrets)
        await failing(life, provider, worker)
        assert {200, 400, 401, 404, 415, 500, 503} <= life.statuses
        await gateway.settled()
        await until(lambda: len(collector.spans) > 20)
        [[logged]] = await gateway.sql("SELECT count(*) FROM request_log")
        assert logged > 5
        metrics = gateway.app[METRICS].page(OPENMETRICS).body.decode()
        remembered = await in_redis(redis_url)
    written = {
        "log": log.getvalue(),
        "spans": str(collector.spans),
        "metrics": metrics,
        "errors": "\n".join(life.errors),
        "redis": remembered,
        **files(home),
    }
    assert all(written[name] for name in ("log", "spans", "metrics", "errors", "redis", "dump of headgate.db"))
    assert any("gateway-0" in name for name in written)
    found = {(what, where) for where, said in written.items() for what, secret in secrets.items() if secret in said}
    in_sql = {"label", "id in a key"}
    assert {(what, where) for what, where in found if what not in in_sql or "headgate.db" not in where} == set()
    assert {(what, "dump of headgate.db") for what in in_sql} <= found


async def rightly(life: Life, secrets: dict[str, str]) -> None:
    """Requests that are in order, of each kind that takes a text or makes a secret."""
    mine, operator = life.gateway.keys.api_key, life.gateway.keys.admin_key
    right: list[tuple[str, str, Any]] = [
        (CHAT, mine, chat()),
        (CHAT, mine, chat(stream=True, unknown=PROMPT)),
        (CHAT, mine, chat(model="bought")),
        (CHAT, mine, chat(user=LABEL, metadata={"note": LABEL})),
        ("/v1/completions", mine, {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}),
        ("/v1/responses", mine, {"model": MODEL, "input": PROMPT, "store": True}),
        ("/v1/responses", mine, {"model": MODEL, "input": PROMPT, "background": True}),
        ("/v1/messages", mine, chat()),
        ("/v1/embeddings", mine, {"model": "vectors", "input": PROMPT}),
        ("/tokenize", mine, {"model": MODEL, "prompt": PROMPT}),
        ("/v1/quotes", mine, {"endpoint": CHAT, "body": chat()}),
    ]
    for path, key, body in right:
        status, answer = await life.ask(key, "POST", path, body)
        assert status == 200, (path, answer)
    for _ in range(2):
        status, _ = await life.ask(mine, "POST", CHAT, chat(), {"idempotency-key": "once"})
        assert status == 200
    form = aiohttp.FormData({"purpose": "batch"})
    line = {"custom_id": "1", "method": "POST", "url": CHAT, "body": chat(FILE)}
    form.add_field("file", json.dumps(line), filename="lines.jsonl")
    status, made = await life.ask(mine, "POST", "/v1/files", form)
    assert status == 200, made
    batch = {"input_file_id": made["id"], "endpoint": CHAT, "completion_window": "24h"}
    assert (await life.ask(mine, "POST", "/v1/batches", batch))[0] == 200
    hook = {"url": "https://example.com/x", "events": ["headgate.usage.v1"]}
    status, made = await life.ask(operator, "POST", "/admin/v1/webhooks", hook)
    assert status == 200, made
    secrets["secret of a webhook"] = made["secret"]
    upstream = {"name": "stored", "url": "http://127.0.0.1:9/v1", "models": {"x": {}}, "credential": STORED}
    status, made = await life.ask(operator, "POST", "/admin/v1/upstreams", upstream)
    assert status == 200, made


async def with_keys_in_wrong_places(life: Life, secrets: dict[str, str]) -> None:
    mine = life.gateway.keys.api_key
    keys = [secret for what, secret in secrets.items() if "key" in what or "credential" in what]
    for key in keys:
        for name in HEADS if key.startswith("hg_") else HEADS[len(OWN_IDS) :]:
            await life.ask("", "POST", CHAT, chat(), {name: key})
            await life.ask(mine, "GET", "/v1/models", None, {name: key} if name != "authorization" else {})
        for name in ("x-api-key", "api-key"):
            await life.ask(mine, "POST", CHAT, chat(), {name: key})  # beside another one
        for path in (f"/v1/models?api_key={key}", f"/v1/models/{key}", f"/v1/files?after={key}", f"/{key}"):
            await life.ask(mine, "GET", path)
            await life.ask("", "GET", path)
        await life.ask(mine, "POST", CHAT, chat(key))
        await life.ask(mine, "POST", CHAT, chat(api_key=key))
        await life.ask(mine, "POST", CHAT, chat(model=key))
        await life.ask(mine, "POST", CHAT, chat(response_format=key))
        reader, writer = await life.gateway.socket()
        writer.write(f"GET /v1/models HTTP/9.9\r\nauthorization {key}\r\n\r\n".encode())
        life.errors.append((await reader.read()).decode())
        writer.close()


async def refused(life: Life, secrets: dict[str, str]) -> None:
    """Bodies that cannot be read, or say what cannot be."""
    mine = life.gateway.keys.api_key
    for body in (
        f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": "{PROMPT}',
        f'"{PROMPT}"',
        PROMPT,
        json.dumps(chat()).replace(PROMPT, PROMPT + "\\ud800"),
        chat(temperature=PROMPT),
        chat(stop=[PROMPT] * 99),
        chat(tools=[{"type": "function", "function": {"name": PROMPT + " ", "parameters": {"type": PROMPT}}}]),
        chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": PROMPT}}}),
        chat(PROMPT * 500),
        {"model": MODEL, "messages": [{"role": PROMPT, "content": PROMPT}]},
        {"model": MODEL, "messages": [{"role": "user", "content": [{"type": PROMPT, "text": PROMPT}]}]},
    ):
        status, _ = await life.ask(mine, "POST", CHAT, body)
        assert status == 400, body
    assert (await life.ask(mine, "POST", CHAT, chat(), {"content-type": "text/" + PROMPT}))[0] == 415


async def failing(life: Life, provider: Provider, worker: ScriptedWorker) -> None:
    """A provider, a worker and tables that fail."""
    mine, operator = life.gateway.keys.api_key, life.gateway.keys.admin_key
    provider.scripts = [Script(status=status) for status in (401, 400, 500, 500, 500, 500)]
    for _ in range(3):
        assert (await life.ask(mine, "POST", CHAT, chat(model="bought")))[0] >= 400
    worker.runner.fail_next = RuntimeError("a step that fails")
    assert (await life.ask(mine, "POST", CHAT, chat()))[0] == 500
    tables = ("response", "idempotent_reply", "webhook", "upstream", "request_log", "file")
    for renamed in tables:
        await rename(life.gateway, renamed, "away")
        await life.ask(mine, "POST", "/v1/responses", {"model": MODEL, "input": PROMPT})
        await life.ask(mine, "POST", CHAT, chat(user=LABEL), {"idempotency-key": f"{LABEL} {renamed}"})
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", FILE, filename="lines.jsonl")
        await life.ask(mine, "POST", "/v1/files", form)
        await life.ask(operator, "POST", "/admin/v1/webhooks", {"url": f"https://example.com/{LABEL}"})
        more = {"name": f"more-{len(renamed)}", "url": "http://127.0.0.1:9/v1", "models": {"y": {}}}
        await life.ask(operator, "POST", "/admin/v1/upstreams", more | {"credential": STORED})
        await asyncio.sleep(0.3)
        await rename(life.gateway, "away", renamed)


async def rename(gateway: RunningGateway, name: str, to: str) -> None:
    async with gateway.app[DATABASE].write() as conn:
        await conn.execute(text(f'ALTER TABLE "{name}" RENAME TO "{to}"'))


async def in_redis(url: str) -> str:
    """All keys of Redis with their values."""
    client = redis.asyncio.from_url(url)
    try:
        return str([(key, await client.dump(key)) async for key in client.scan_iter()])
    finally:
        await client.aclose()


def files(home: Path) -> dict[str, str]:
    """All files of the home but those of secrets, by their paths; the database also as its statements."""
    found = {
        str(path.relative_to(home)): path.read_bytes().decode("latin-1")
        for path in home.rglob("*")
        if path.is_file() and path.parent != home / "secrets"
    }
    with sqlite3.connect(home / "headgate.db") as database:
        found["dump of headgate.db"] = "\n".join(database.iterdump())
    database.close()
    return found
