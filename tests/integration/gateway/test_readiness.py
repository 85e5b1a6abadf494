"""O2: `/readyz` is 503 where every request is, and names what is missing; each 503 of a request names its cause."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis
from byte_model import tokenizer_spec
from disks import fill, mounted
from fakes import ScriptedRunner, ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway, until
from own_redis import OwnRedis

from gateway import changes, readiness
from gateway.base.app_keys import DATABASE, LIFECYCLE, REDIS
from gateway.base.settings import GatewaySettings
from gateway.generation.stream import GENERATION
from gateway.limiter.limits import limiter_link
from gateway.metering.metering import METERING
from gateway.metering.slot_owner import SlotOwner
from gateway.routing.links import fleet, worker_link
from workers.process.vocabulary_digest import vocabulary_digest


@pytest.fixture(autouse=True, scope="module")
def checks_are_soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readiness, "EVERY_S", 0.1)
        yield


async def probe(gateway: RunningGateway) -> tuple[int, str, dict[str, str]]:
    """Status, word, and what is not ok."""
    async with gateway.session("") as session, session.get("/readyz") as answer:
        body = await answer.json()
    missing = {c["name"]: c["message"] for c in body["checks"] if c.get("state", "ok") != "ok"}
    return answer.status, body["status"], missing


async def until_probe(gateway: RunningGateway, status: int, word: str, limit_s: float = 30.0) -> dict[str, str]:
    async with asyncio.timeout(limit_s):
        while True:
            found = await probe(gateway)
            if found[:2] == (status, word):
                return found[2]
            await asyncio.sleep(0.05)


async def ask(session: aiohttp.ClientSession, model: str = MODEL) -> tuple[int, str | None]:
    messages = [{"role": "user", "content": "hello"}]
    content = {"model": model, "messages": messages, "max_tokens": 2}
    async with session.post("/v1/chat/completions", json=content) as answer:
        return answer.status, (await answer.json()).get("error", {}).get("code")


@contextlib.asynccontextmanager
async def served(tmp_path: Path, redis_url: str, **more: Any) -> AsyncIterator[RunningGateway]:
    async with (
        running_gateway(tmp_path / "home", redis_url, limiter_timeout_s=1.0, **more) as gateway,
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=tmp_path / "w0"),
    ):
        await gateway.workers(1)
        await until_probe(gateway, 200, "ok")
        yield gateway


async def test_o2_a_model_without_a_worker_is_named_and_its_requests_say_so(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway
) -> None:
    missing = await until_probe(bare_gateway, 503, "unready")
    assert missing == {f"model:{MODEL}": "No worker of this model is linked."}
    async with bare_gateway.session() as session:
        assert await ask(session) == (503, "no_worker")
        async with ScriptedWorker(tmp_path / "w.sock", redis_url=redis_url):
            await until_probe(bare_gateway, 200, "ok")
            assert await ask(session) == (200, None)
        await until_probe(bare_gateway, 503, "unready")
        assert await ask(session) == (503, "no_worker")


async def test_o2_of_two_models_one_without_a_worker_is_named_and_the_other_served(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "home" / "model"
    monkeypatch.setattr("gateways.GatewaySettings", partial(with_another, str(models)))
    async with (
        running_gateway(tmp_path / "home", redis_url) as gateway,
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url),
        gateway.session() as session,
    ):
        missing = await until_probe(gateway, 200, "degraded")
        assert missing == {"model:another": "No worker of this model is linked."}
        assert await ask(session) == (200, None)
        assert await ask(session, "another") == (503, "no_worker")


def with_another(path: str, **told: Any) -> GatewaySettings:
    models = {**told.pop("models"), "another": {"path": path}}
    return GatewaySettings(models=models, **told)


async def test_o2_workers_with_another_tokenizer_are_named(
    tmp_path: Path, redis_url: str, bare_gateway: RunningGateway
) -> None:
    """Here alone, and beside a worker with the gateway's own tokenizer that takes nothing new."""

    def worker(slot: int, vocabulary: str) -> ScriptedWorker:
        return ScriptedWorker(
            tmp_path / f"w{slot}.sock", redis_url=redis_url, slot=slot, runner=ScriptedRunner(vocabulary=vocabulary)
        )

    why = "have another tokenizer than the one that this gateway has read."
    named = {f"model:{MODEL}": f"Its workers {why}"}
    async with worker(0, "of others"), bare_gateway.session() as session:
        await bare_gateway.workers(1)
        assert await probe(bare_gateway) == (503, "unready", named)
        assert await refusal(session) == f"The workers of this model that take work {why}"
        async with worker(1, vocabulary_digest(tokenizer_spec())) as own:
            await bare_gateway.workers(2)
            assert await probe(bare_gateway) == (200, "ok", {})
            assert await ask(session) == (200, None)
            own.service.stop_accepting()
            assert await until_probe(bare_gateway, 503, "unready") == named
            assert await refusal(session) == f"The workers of this model that take work {why}"


async def refusal(session: aiohttp.ClientSession) -> str:
    """Returns the message of a request's 503 `no_worker`."""
    async with session.post("/v1/completions", json={"model": MODEL, "prompt": "hello", "max_tokens": 2}) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (503, "no_worker")
        return str(error["message"])


@pytest.mark.rest
async def test_o2_a_redis_that_does_not_answer_is_named(tmp_path: Path, own_redis: OwnRedis) -> None:
    async with served(tmp_path, own_redis.url) as gateway, gateway.session() as session:
        own_redis.send(signal.SIGSTOP)
        missing = await until_probe(gateway, 503, "unready")
        assert missing == {"limiter": "Redis does not answer."}
        assert await ask(session) == (503, "limiter_unavailable")
        own_redis.send(signal.SIGCONT)
        await until_probe(gateway, 200, "ok")


async def test_o2_a_redis_that_refuses_writes_is_named(tmp_path: Path, own_redis: OwnRedis) -> None:
    """It answers, and every request gets 503."""
    async with served(tmp_path, own_redis.url) as gateway, gateway.session() as session:
        with redis.Redis.from_url(own_redis.url) as client:
            client.config_set("maxmemory", 1)
            missing = await until_probe(gateway, 503, "unready")
            assert missing == {"limiter": "Redis refuses writes: it has no memory left."}
            assert await ask(session) == (503, "limiter_unavailable")
            client.config_set("maxmemory", 0)
        await until_probe(gateway, 200, "ok")
        assert await ask(session) == (200, None)


@pytest.mark.rest
async def test_o2_a_redis_whose_disk_is_full_is_named(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 4 * 1024 * 1024) as disk:
        server = OwnRedis(disk)
        server.start()
        try:
            async with served(tmp_path, server.url) as gateway, gateway.session() as session:
                theirs = fill(disk)
                missing = await until_probe(gateway, 503, "unready")
                assert list(missing) == ["limiter"]
                assert "its disk, which may be full" in missing["limiter"]
                assert await ask(session) == (503, "limiter_unavailable")
                theirs.unlink()
                await until_probe(gateway, 200, "ok")
                assert await ask(session) == (200, None)
        finally:
            server.kill()


async def test_o2_a_full_disk_of_the_journal_is_named(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tmp_path, redis_url) as gateway, gateway.session() as session:
        ballast = gateway.app[METERING].journal._log.ballast
        monkeypatch.setattr(ballast, "take", lambda: False)
        ballast.give_up()
        missing = await until_probe(gateway, 503, "unready")
        assert missing == {"disk": "The disk of the journal is full: make room on it."}
        assert await ask(session) == (503, "disk_full")
        monkeypatch.undo()
        await until_probe(gateway, 200, "ok")


async def test_b2_a_worker_whose_disk_is_full_is_named(tmp_path: Path, redis_url: str) -> None:
    async with (
        running_gateway(tmp_path / "home", redis_url) as gateway,
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=tmp_path / "w0") as worker,
        gateway.session() as session,
    ):
        await until_probe(gateway, 200, "ok")
        assert worker._journal is not None
        ballast = worker._journal._log.ballast
        take, ballast.take = ballast.take, lambda: False
        ballast.give_up()
        missing = await until_probe(gateway, 503, "unready")
        assert missing == {f"model:{MODEL}": "The disk of its workers is full."}
        assert await ask(session) == (503, "disk_full")
        ballast.take = take
        await until_probe(gateway, 200, "ok")
        assert await ask(session) == (200, None)


class Way:
    """A TCP way to PostgreSQL that can be closed and opened."""

    def __init__(self) -> None:
        self.is_open = True
        self._links: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.is_open:
            writer.transport.abort()
            return
        theirs, ours = await asyncio.open_connection("127.0.0.1", 5432)
        self._links |= {writer, ours}
        try:
            await asyncio.gather(self._copy(reader, ours), self._copy(theirs, writer))
        finally:
            for link in (writer, ours):
                link.transport.abort()
                self._links.discard(link)

    def close(self) -> None:
        self.is_open = False
        for link in self._links:
            link.transport.abort()

    async def aclose(self) -> None:
        self.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@pytest.mark.parametrize("database_url", ["postgresql"], indirect=True)
async def test_o2_sql_that_is_gone_is_degraded_while_somebody_is_served_and_then_unready(
    tmp_path: Path, redis_url: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "SILENT_S", 0.5)
    monkeypatch.setattr(changes, "EPOCH_EVERY_S", 0.1)
    way = Way()
    server = await asyncio.start_server(way.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    url = database_url.replace(":5432/", f":{port}/")
    async with (
        contextlib.aclosing(way),
        server,
        served(tmp_path, redis_url, database_url=url) as gateway,
        gateway.session() as session,
    ):
        _, stranger = await gateway.new_tenant("a stranger")
        way.close()
        missing = await until_probe(gateway, 503, "unready")
        assert missing == {"database": "The database does not answer."}, "nobody is remembered"
        assert await ask(session) == (503, "database_unavailable")
        way.is_open = True
        await until_probe(gateway, 200, "ok")
        assert await ask(session) == (200, None)
        way.close()
        missing = await until_probe(gateway, 200, "degraded")
        assert list(missing) == ["database"]
        assert await ask(session) == (200, None), "a remembered key is served"
        async with gateway.session(stranger) as other:
            assert await ask(other) == (503, "database_unavailable")
        way.is_open = True
        await until_probe(gateway, 200, "ok")
        await gateway.balanced()


async def test_o2_probes_ask_neither_sql_nor_redis(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    database, client = gateway.app[DATABASE], gateway.app[REDIS]
    asked: list[str] = []
    read, execute = database.read, client.execute_command

    def counted_read() -> Any:
        asked.append("sql")
        return read()

    def counted_execute(*args: Any, **options: Any) -> Any:
        asked.append("redis")
        return execute(*args, **options)

    await until_probe(gateway, 200, "ok")
    monkeypatch.setattr(database, "read", counted_read)
    monkeypatch.setattr(client, "execute_command", counted_execute)
    for _ in range(20):
        gateway.app[LIFECYCLE].report()
    assert asked == [], "a report waits for nobody"
    for _ in range(300):
        assert (await probe(gateway))[0] == 200
    assert len(asked) < 300, "only the tasks that always ask have asked"


async def test_o2_a_clock_far_off_is_named_and_requests_are_served(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    await until_probe(gateway, 200, "ok")
    monkeypatch.setattr(readiness, "CLOCK_APART_S", -1.0)
    missing = await until_probe(gateway, 200, "degraded")
    assert missing["clock"].startswith("Redis' clock is 0 s")
    async with gateway.session() as session:
        assert await ask(session) == (200, None)


@pytest.mark.parametrize("models", [{}, None])
async def test_o2_a_worker_that_is_refused_is_named_whether_its_model_is_served_or_not(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, models: dict[str, Any] | None
) -> None:
    monkeypatch.setattr(fleet, "REFUSED_S", 0.1)
    monkeypatch.setattr(worker_link, "PROTOCOL_VERSION", 99)
    served = {} if models is None else {"models": models}
    async with (
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url),
        running_gateway(tmp_path / "home", redis_url, **served) as gateway,
    ):
        await until(lambda: gateway.app[GENERATION].fleet.refused)
        status, word, missing = await probe(gateway)
        assert (status, word) == ((200, "degraded") if models == {} else (503, "unready"))
        assert missing["workers"] == "A registered worker is refused: `headgate workers list` says why."
        async with gateway.session(gateway.keys.admin_key) as session, session.get("/admin/v1/workers") as answer:
            [one] = (await answer.json())["unreachable"]
        assert "speaks version 1 of the links' protocol, and this gateway 99" in one["refused"]
        monkeypatch.setattr(worker_link, "PROTOCOL_VERSION", 1)
        assert await until_probe(gateway, 200, "ok") == {}


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
async def test_o2_how_far_redis_clock_is_off_is_measured(own_redis: OwnRedis, tmp_path: Path, ahead_s: float):
    client = redis.asyncio.from_url(own_redis.url)
    owner = SlotOwner(limiter_link(own_redis.url), 0, tmp_path)
    one = readiness.RedisProbe(client, owner, clock=lambda: time.time() - ahead_s)
    asked = await one.ask()
    await client.aclose()
    assert asked.ahead_s == pytest.approx(ahead_s, abs=60)
    (_, clock) = readiness.of_limiter(asked)
    assert (clock.name, clock.state) == ("clock", "degraded")
    assert ("ahead of" if ahead_s > 0 else "behind") in clock.message
