"""Links to workers by TCP: both ends show a certificate, and a link whose ends do not trust each other says why."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import CLIENT, SERVER, Authority, Pair
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway, until

from gateway.generation.stream import GENERATION
from gateway.routing.links import fleet as fleets
from gateway.telemetry.metrics import METRICS
from workers.process.certificates import Certificate, Files, Setting, listening_context

MESSAGES: Any = [{"role": "user", "content": "hi"}]
REFUSED_S = 0.1


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that was refused is dialled again soon."""
    monkeypatch.setattr(fleets, "REFUSED_S", REFUSED_S)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"))


@pytest.fixture
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    return f"tcp:127.0.0.1:{port}"


def settings(authority: Authority, pair: Pair) -> dict[str, Path]:
    return {"link_ca": authority.ca, "link_cert": pair.cert, "link_key": pair.key}


def certificate(authority: Authority, pair: Pair) -> Certificate:
    files = Files(Setting("CERT", pair.cert), Setting("KEY", pair.key), Setting("CA", authority.ca))
    return Certificate(files, listening_context)


def of_gateway(authority: Authority, **how: Any) -> dict[str, Path]:
    return settings(authority, authority.sign("gateway", use=CLIENT, **how))


def of_worker(authority: Authority, host: str = "127.0.0.1", **how: Any) -> Certificate:
    return certificate(authority, authority.sign("worker", host, **how))


@contextlib.asynccontextmanager
async def linked(
    home: Path, redis_url: str, address: str, worker: Certificate | None, **gateway: Any
) -> AsyncIterator[RunningGateway]:
    """A gateway and a worker that have found each other in Redis."""
    async with (
        ScriptedWorker(home, redis_url=redis_url, address=address, certificate=worker),
        running_gateway(home / "home", redis_url, **gateway) as running,
    ):
        yield running


async def refusal(gateway: RunningGateway) -> str:
    """Waits until the worker was refused at least three times, and returns what the operator's list of workers says."""
    fleet = gateway.app[GENERATION].fleet
    await until(lambda: fleet.num_refused >= 3)
    async with gateway.session(gateway.keys.admin_key) as session, session.get("/admin/v1/workers") as answer:
        found = await answer.json()
    [one] = found["unreachable"]
    assert found["data"] == []
    assert (gateway.app[METRICS].registry.get_sample_value("headgate_worker_links_refused_total") or 0) >= 3
    return str(one["refused"])


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    return [record.why for record in caplog.records if event in (getattr(record, "event", ""), record.msg)]


async def test_tokens_travel_on_a_link_whose_ends_know_each_other(
    tmp_path: Path, redis_url: str, address: str, authority: Authority
) -> None:
    async with linked(tmp_path, redis_url, address, of_worker(authority), **of_gateway(authority)) as gateway:
        await gateway.workers(1)
        answer = await gateway.client().chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=16)
        assert answer.usage is not None and answer.usage.completion_tokens == 16
        await gateway.balanced()


@pytest.mark.parametrize(
    ("of", "why"),
    [
        ("another authority", "unable to get local issuer certificate"),
        ("another host", "IP address mismatch"),
        ("an end in the past", "certificate has expired"),
        ("a gateway", "unsuitable certificate purpose"),
    ],
)
async def test_a_worker_that_shows_the_certificate_of(
    of: str,
    why: str,
    tmp_path: Path,
    redis_url: str,
    address: str,
    authority: Authority,
    stranger: Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    how: dict[str, Any] = {
        "another host": {"host": "127.0.0.2"},
        "an end in the past": {"days": -1},
        "a gateway": {"use": CLIENT},
    }.get(of, {})
    worker = of_worker(stranger if of == "another authority" else authority, **how)
    async with linked(tmp_path, redis_url, address, worker, **of_gateway(authority)) as gateway:
        assert why in await refusal(gateway)
    assert len(said(caplog, "worker_link_refused")) == 1, "the log has it once"
    assert said(caplog, "link_refused") == [
        "it ended the connection during the handshake: if it refused our certificate, its log says why"
    ]


@pytest.mark.parametrize(
    ("of", "why"),
    [
        ("another authority", "unable to get local issuer certificate"),
        ("an end in the past", "certificate has expired"),
        ("a worker", "unsuitable certificate purpose"),
    ],
)
async def test_a_gateway_that_shows_the_certificate_of(
    of: str,
    why: str,
    tmp_path: Path,
    redis_url: str,
    address: str,
    authority: Authority,
    stranger: Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    how: dict[str, Any] = {"an end in the past": {"days": -1}, "a worker": {"use": SERVER}}.get(of, {})
    shown = of_gateway(stranger if of == "another authority" else authority, **how)
    shown["link_ca"] = authority.ca
    async with linked(tmp_path, redis_url, address, of_worker(authority), **shown) as gateway:
        assert "if it refused this gateway's certificate" in await refusal(gateway)
    [reason] = said(caplog, "link_refused")
    assert why in reason


async def test_who_shows_no_certificate_is_not_let_in(
    tmp_path: Path, redis_url: str, address: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    import ssl

    context = ssl.create_default_context(cafile=authority.ca)
    host, port = address.removeprefix("tcp:").split(":")
    async with ScriptedWorker(tmp_path, redis_url=redis_url, address=address, certificate=of_worker(authority)):
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        with contextlib.suppress(ConnectionResetError, ssl.SSLError):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: said(caplog, "link_refused"))
    assert said(caplog, "link_refused") == ["it shows no certificate"]


async def test_tls_against_a_worker_without(
    tmp_path: Path, redis_url: str, address: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(tmp_path, redis_url, address, None, **of_gateway(authority)) as gateway:
        assert await refusal(gateway) == "it does not speak TLS"
    bad = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "bad_frame"]
    assert "the peer speaks TLS, and this side does not" in bad[0]


async def test_no_tls_against_a_worker_with(
    tmp_path: Path, redis_url: str, address: str, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with linked(tmp_path, redis_url, address, of_worker(authority)) as gateway:
        assert "HEADGATE_LINK_CA is not set" in await refusal(gateway)
    assert said(caplog, "link_refused") == ["it does not speak TLS"]


@pytest.mark.parametrize("may_be_plain", [False, True])
async def test_an_address_beyond_this_machine_is_dialled_without_tls_only_if_that_is_set(
    may_be_plain: bool, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """No machine is beyond this one, so that loopback counts as it."""
    monkeypatch.setattr("workers.protocol.addresses.is_open", lambda _: True)
    async with linked(tmp_path, redis_url, address, None, link_plain=may_be_plain) as gateway:
        if may_be_plain:
            await gateway.workers(1)
        else:
            assert "needs TLS" in await refusal(gateway)


async def test_a_new_certificate_mends_a_link_without_a_restart(
    tmp_path: Path, redis_url: str, address: str, authority: Authority
) -> None:
    worker = of_worker(authority, days=-1)
    async with linked(tmp_path, redis_url, address, worker, **of_gateway(authority)) as gateway:
        await refusal(gateway)
        authority.sign("worker", "127.0.0.1")
        worker.look()
        await gateway.workers(1)


async def test_handshakes_that_do_not_end_keep_no_gateway_out(
    tmp_path: Path, redis_url: str, address: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.engine.link_listener.HANDSHAKE_S", 0.5)
    host, port = address.removeprefix("tcp:").split(":")
    async with linked(tmp_path, redis_url, address, of_worker(authority), **of_gateway(authority)) as gateway:
        await gateway.workers(1)
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
        for reader, writer in silent:
            with contextlib.suppress(ConnectionResetError):
                assert await reader.read() == b""
            writer.close()
        answer = await gateway.client().chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4)
        assert answer.usage is not None
