"""How jobs and commands reach the gateways: by a unix socket, or by TLS with an authority of the operator's."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from certificates import Authority

from gateway.cli.server_place import given
from workers.jobs.base import gateways
from workers.jobs.base.settings import JobsSettings


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
async def urls(tmp_path: Path, authority: Authority) -> AsyncIterator[list[str]]:
    """A server on a unix socket and by TLS."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"secure": request.secure, "path": request.path})

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    pair = authority.sign("listener", "127.0.0.1")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.cert, pair.key)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "base.sock")).start()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    port = runner.addresses[1][1]
    yield [f"unix://{tmp_path}/base.sock", f"https://127.0.0.1:{port}"]
    await runner.cleanup()


def settings(url: str, home: Path, ca: Path | None = None) -> JobsSettings:
    return JobsSettings(home=home, url=url, url_ca=ca, broker_url="memory://")


async def asked_by_jobs(told: JobsSettings) -> bool:
    async with (
        gateways.session(told, aiohttp.ClientTimeout(total=10)) as session,
        session.get(f"{gateways.base_url(told)}/v1/models") as answer,
    ):
        return bool((await answer.json())["secure"])


async def asked_by_a_command(url: str) -> bool:
    server = given(url)
    assert server is not None
    async with (
        aiohttp.ClientSession(connector=server.connector()) as session,
        session.get(f"{server.base}/v1/models") as answer,
    ):
        return bool((await answer.json())["secure"])


async def test_jobs_ask_by_either(urls: list[str], tmp_path: Path, authority: Authority) -> None:
    socket, https = urls
    assert not await asked_by_jobs(settings(socket, tmp_path))
    assert await asked_by_jobs(settings(https, tmp_path, authority.ca))
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await asked_by_jobs(settings(https, tmp_path))


async def test_commands_ask_by_either(urls: list[str], authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    socket, https = urls
    assert not await asked_by_a_command(socket)
    with pytest.raises(aiohttp.ClientConnectorCertificateError):
        await asked_by_a_command(https)
    monkeypatch.setenv("HEADGATE_URL_CA", str(authority.ca))
    assert await asked_by_a_command(https)


@pytest.mark.parametrize("url", ["unix://", "unix:/x", "ftp://h", "https:///v1"])
def test_what_is_no_place_of_a_gateway_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="it should begin with"):
        settings(url, tmp_path)
    assert given(url) is None
