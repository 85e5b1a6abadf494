"""Links to workers by TCP: both ends show a certificate, and a link whose ends do not trust each other says why."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import CLIENT, SERVER, Authority, Pair
from fakes import MODEL, ROOT, ScriptedWorker
from gateways import RunningGateway, running_gateway, until

from gateway.generation.stream import GENERATION
from gateway.routing.links import fleet as fleets
from gateway.routing.links.fleet import Fleet
from gateway.routing.links.trust import LinkDown, LinkRefused, Trust
from gateway.routing.links.worker_link import WorkerLink
from gateway.telemetry.metrics import METRICS
from workers.process.tls.certificates import Certificate, Files, Setting, dialling_context, listening_context
from workers.protocol import addresses
from workers.protocol.counts import EngineAck, EngineRecords
from workers.protocol.frames import encode
from workers.protocol.messages import PROTOCOL_VERSION, Hello
from workers.protocol.registry import Registration

MESSAGES: Any = [{"role": "user", "content": "hi"}]
ENDED_BY_GATEWAY = "it ended the connection during the handshake: if it refused our certificate, its log says why"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "theirs")


@pytest.fixture
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    return f"tcp:127.0.0.1:{port}"


def files(ca: Authority, pair: Pair) -> Files:
    return Files(Setting("CERT", pair.cert), Setting("KEY", pair.key), Setting("CA", ca.ca))


def of_worker(ca: Authority, signed_by: Authority, host: str = "127.0.0.1", **how: Any) -> Certificate:
    return Certificate(files(ca, signed_by.sign("worker", host, **how)), listening_context)


def of_gateway(ca: Authority, signed_by: Authority, **how: Any) -> Certificate:
    how.setdefault("use", CLIENT)
    return Certificate(files(ca, signed_by.sign("gateway", **how)), dialling_context)


def registered(address: str) -> Registration:
    return Registration("worker-0", "p", address, MODEL, ROOT, 1)


async def keep(records: EngineRecords) -> EngineAck:
    return EngineAck(records.worker, records.records[-1].seq)


async def refusal(address: str, gateway: Certificate | None, **how: Any) -> str:
    """Dials a worker once, and returns why there is no link."""
    with pytest.raises(LinkRefused) as refused:
        await WorkerLink(registered(address), "me", keep, trust=Trust(gateway, **how)).run()
    return str(refused.value)


def said(caplog: pytest.LogCaptureFixture, event: str) -> list[str]:
    """Returns why, of each record of an event."""
    return [record.why for record in caplog.records if event in (getattr(record, "event", ""), record.msg)]


@pytest.mark.parametrize(
    ("of", "why"),
    [
        ("another authority", "unable to get local issuer certificate"),
        ("another host", "IP address mismatch, certificate is not valid for '127.0.0.1'"),
        ("an end in the past", "certificate has expired"),
        ("a gateway", "unsuitable certificate purpose"),
    ],
)
async def test_a_gateway_refuses_a_worker_with_the_certificate_of(
    of: str, why: str, tmp_path: Path, address: str, authority: Authority, stranger: Authority, caplog: Any
) -> None:
    ways: dict[str, dict[str, Any]] = {
        "another authority": {"signed_by": stranger},
        "another host": {"host": "127.0.0.2"},
        "an end in the past": {"days": -1},
        "a gateway": {"use": CLIENT},
    }
    worker = of_worker(authority, **{"signed_by": authority} | ways[of])
    async with ScriptedWorker(tmp_path, address=address, certificate=worker):
        assert why in await refusal(address, of_gateway(authority, authority))
        await until(lambda: said(caplog, "link_refused"))
    assert said(caplog, "link_refused") == [ENDED_BY_GATEWAY]


@pytest.mark.parametrize(
    ("of", "why"),
    [
        ("another authority", "unable to get local issuer certificate"),
        ("an end in the past", "certificate has expired"),
        ("a worker", "unsuitable certificate purpose"),
    ],
)
async def test_a_worker_refuses_a_gateway_with_the_certificate_of(
    of: str, why: str, tmp_path: Path, address: str, authority: Authority, stranger: Authority, caplog: Any
) -> None:
    ways: dict[str, dict[str, Any]] = {
        "another authority": {"signed_by": stranger},
        "an end in the past": {"days": -1},
        "a worker": {"use": SERVER},
    }
    gateway = of_gateway(authority, **{"signed_by": authority} | ways[of])
    async with ScriptedWorker(tmp_path, address=address, certificate=of_worker(authority, authority)):
        assert "if it refused this gateway's certificate, its log says why" in await refusal(address, gateway)
        assert "if it refused this gateway's certificate, its log says why" in await refusal(address, gateway)
    [reason] = said(caplog, "link_refused")  # the log has it once a minute
    assert why in reason


async def test_a_worker_lets_nobody_in_who_shows_no_certificate(
    tmp_path: Path, address: str, authority: Authority, caplog: Any
) -> None:
    host, port = address.removeprefix("tcp:").split(":")
    context = ssl.create_default_context(cafile=authority.ca)
    async with ScriptedWorker(tmp_path, address=address, certificate=of_worker(authority, authority)) as worker:
        reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        with contextlib.suppress(ConnectionResetError, ssl.SSLError):
            assert await reader.read() == b""
        writer.close()
        await until(lambda: said(caplog, "link_refused"))
        assert not worker.service._links
    assert said(caplog, "link_refused") == ["it shows no certificate"]


async def test_tls_against_a_worker_without_is_said_on_both_sides(
    tmp_path: Path, address: str, authority: Authority, caplog: Any
) -> None:
    async with ScriptedWorker(tmp_path, address=address):
        assert await refusal(address, of_gateway(authority, authority)) == "it does not speak TLS"
    [bad] = [record.getMessage() for record in caplog.records if getattr(record, "event", "") == "bad_frame"]
    assert "the peer speaks TLS, and this side does not" in bad


async def test_no_tls_against_a_worker_with_it_is_said_on_both_sides(
    tmp_path: Path, address: str, authority: Authority, caplog: Any
) -> None:
    async with ScriptedWorker(tmp_path, address=address, certificate=of_worker(authority, authority)):
        assert "HEADGATE_LINK_CA is not set for this gateway" in await refusal(address, None)
        await until(lambda: said(caplog, "link_refused"))
    assert said(caplog, "link_refused") == ["it does not speak TLS"]


async def test_an_address_beyond_this_machine_is_dialled_without_tls_only_if_that_is_set(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No machine is beyond this one here, so that loopback has to count as it."""
    assert "HEADGATE_LINK_PLAIN=1" in await refusal("tcp:192.0.2.1:7000", None)
    monkeypatch.setattr("workers.protocol.addresses.is_open", lambda _: True)
    async with ScriptedWorker(tmp_path, address=address):
        assert "needs TLS" in await refusal(address, None)
        link = WorkerLink(registered(address), "me", keep, trust=Trust(may_be_plain=True))
        running = asyncio.create_task(link.run())
        await until(lambda: link.is_up)
        link.abort()
        await running


@pytest.mark.parametrize("how", ["another model", "cut here"])
async def test_a_link_that_ends_although_nobody_distrusts_is_no_refusal(how: str, address: str) -> None:
    """The worker serves another model and ends, or this gateway cuts a link before the worker's hello."""
    where = addresses.host_port(address)
    assert where is not None

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if how == "another model":
            writer.write(encode(Hello(PROTOCOL_VERSION, "p", model="other")))
            writer.write_eof()
            await reader.read()
        else:
            await reader.readexactly(1)
            link.abort()
        writer.close()

    link = WorkerLink(registered(address), "me", keep)
    async with await asyncio.start_server(serve, *where):
        await link.run()
    assert not link.is_up


async def test_a_worker_that_ends_within_a_handshake_is_down_and_not_distrusted(
    address: str, authority: Authority
) -> None:
    where = addresses.host_port(address)
    assert where is not None

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(1)
        writer.transport.abort()

    link = WorkerLink(registered(address), "me", keep, trust=Trust(of_gateway(authority, authority)))
    async with await asyncio.start_server(serve, *where):
        with pytest.raises(LinkDown) as down:
            await link.run()
    assert type(down.value) is LinkDown


async def test_a_worker_that_is_refused_stays_refused_and_the_log_has_it_once(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    async def look() -> list[Registration]:
        return [registered("tcp:192.0.2.1:7000")]

    monkeypatch.setattr(fleets, "REFUSED_S", 0.05)
    fleet = Fleet(look, keep)
    running = asyncio.create_task(fleet.run())
    await until(lambda: fleet.num_refused >= 3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [one.worker for one in fleet.unreachable] == ["worker-0"]
    [why] = said(caplog, "worker_link_refused")
    assert fleet.refusals == {"worker-0": why}


async def test_the_operator_sees_why_and_a_new_certificate_mends_it_without_a_restart(
    tmp_path: Path, redis_url: str, address: str, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "REFUSED_S", 0.1)
    certificate = of_worker(authority, authority, days=-1)
    pair = authority.sign("gateway", use=CLIENT)
    links = {"link_ca": authority.ca, "link_cert": pair.cert, "link_key": pair.key}
    worker = ScriptedWorker(
        tmp_path, redis_url=redis_url, address=address, certificate=certificate, journal_dir=tmp_path / "journal"
    )
    async with running_gateway(tmp_path / "home", redis_url, **links) as gateway, worker:
        fleet = gateway.app[GENERATION].fleet
        await until(lambda: fleet.num_refused >= 2)
        [one] = (await workers_of(gateway))["unreachable"]
        assert "certificate has expired" in one["refused"]
        assert (
            gateway.app[METRICS].registry.get_sample_value("headgate_worker_links_refused_total") == fleet.num_refused
        )

        authority.sign("worker", "127.0.0.1")
        certificate.look()
        await gateway.workers(1)
        assert (await workers_of(gateway))["unreachable"] == []
        async with gateway.client() as client:
            for num_tokens in (16, 4):
                answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=num_tokens)
                assert answer.usage is not None
                assert answer.usage.completion_tokens == num_tokens
                await handshakes_that_do_not_end(address)
        assert fleet.num_lost == 0
        await gateway.balanced()


async def workers_of(gateway: RunningGateway) -> dict[str, Any]:
    async with gateway.session(gateway.keys.admin_key) as session, session.get("/admin/v1/workers") as answer:
        found: dict[str, Any] = await answer.json()
        return found


async def handshakes_that_do_not_end(address: str) -> None:
    """More of them than a worker has at a time: it closes each, at once or after its time."""
    host, port = address.removeprefix("tcp:").split(":")
    silent = [await asyncio.open_connection(host, int(port)) for _ in range(80)]
    for reader, writer in silent:
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
