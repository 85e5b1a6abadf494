"""Pages of listed origins call the API with a key; the console and other origins get nothing. Request ids of clients."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway
from redis_db import emptied

from gateway.base.settings import SettingsError, load

PAGE, OTHER = "https://app.example", "https://evil.example"
CHAT = "/v1/chat/completions"
ASK = {"origin": PAGE, "access-control-request-method": "POST"}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    directory = tmp_path_factory.mktemp("gateway")
    redis_url = emptied(redis_socket, 3)
    async with (
        running_gateway(directory / "home", redis_url, cors_origins=(PAGE, "http://localhost:3000")) as gateway,
        ScriptedWorker(directory / "w0.sock", redis_url=redis_url),
    ):
        await gateway.workers(1)
        yield gateway


async def test_a_preflight_is_answered_without_a_key(gateway: RunningGateway) -> None:
    headers = ASK | {"access-control-request-headers": "authorization, content-type,x-stainless-os, bad name"}
    async with gateway.session("") as session, session.options(CHAT, headers=headers) as answer:
        assert answer.status == 204
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "POST" in answer.headers["access-control-allow-methods"]
        assert answer.headers["access-control-allow-headers"] == "authorization, content-type, x-stainless-os"
        assert "origin" in answer.headers["vary"].lower()
        assert "access-control-allow-credentials" not in answer.headers
        assert await answer.read() == b""


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (CHAT, ASK | {"origin": OTHER}),
        (CHAT, ASK | {"origin": "null"}),
        (CHAT, ASK | {"origin": PAGE + ".evil.example"}),
        (CHAT, ASK | {"origin": PAGE.upper()}),
        (CHAT, {"origin": PAGE}),
        (CHAT, {"access-control-request-method": "POST"}),
        ("/console/login", ASK),
        ("/%63onsole/login", ASK),
    ],
)
async def test_other_preflights_are_no_preflights(gateway: RunningGateway, path: str, headers: dict[str, str]) -> None:
    async with gateway.session("") as session, session.options(path, headers=headers) as answer:
        assert answer.status in {401, 404, 405}
        if headers.get("origin") != PAGE or "onsole" in path:
            assert "access-control-allow-origin" not in answer.headers


async def test_answers_and_refusals_may_be_read_by_a_listed_page_alone(gateway: RunningGateway) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
    for key, status in ((None, 200), ("", 401)):
        for stream in (False, True):
            async with (
                gateway.session(key) as session,
                session.post(CHAT, json=body | {"stream": stream}, headers={"origin": PAGE}) as answer,
            ):
                assert answer.status == status
                assert answer.headers["access-control-allow-origin"] == PAGE
                assert "x-request-id" in answer.headers["access-control-expose-headers"]
                assert "access-control-allow-credentials" not in answer.headers
    async with gateway.session() as session:
        async with session.post(CHAT, json=body, headers={"origin": OTHER}) as answer:
            assert answer.status == 200
            assert "access-control-allow-origin" not in answer.headers
            assert answer.headers["vary"] == "Origin"
        async with session.get("/console/login", headers={"origin": PAGE}) as answer:
            assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(("path", "limits"), [(CHAT, "x-ratelimit-"), ("/v1/messages", "anthropic-ratelimit-")])
async def test_a_page_may_read_what_the_headers_of_an_answer_say(
    gateway: RunningGateway, path: str, limits: str
) -> None:
    """The headers of the Messages API were kept from it: its request's id and its limits."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "zebra": 1}
    headers = {"origin": PAGE, "traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "x-client-request-id": "mine"}
    async with gateway.session() as session, session.post(path, json=body, headers=headers) as answer:
        assert answer.status == 200
        own = ("x-", "anthropic-", "request-id", "traceresponse")
        told = {name.lower() for name in answer.headers if name.lower().startswith(own)}
        exposed = answer.headers["access-control-expose-headers"].split(", ")
    assert {"x-client-request-id", "x-headgate-ignored", "traceresponse"} < told <= set(exposed)
    assert any(name.startswith(limits) for name in told)
    assert "x-headgate-fallback" in exposed
    assert len(exposed) == len(set(exposed))


async def test_a_clients_own_id_is_repeated_if_it_is_plain(gateway: RunningGateway) -> None:
    async with gateway.session() as session:
        for sent, repeated in (
            ({"x-client-request-id": "job-7/attempt.2"}, "job-7/attempt.2"),
            ({"x-request-id": "mine"}, "mine"),
            ({"x-request-id": "mine", "x-client-request-id": "better"}, "better"),
            ({"x-client-request-id": "x" * 512}, "x" * 512),
            ({"x-client-request-id": "x" * 513}, None),
            ({"x-client-request-id": "two words"}, None),
            ({"x-client-request-id": "né"}, None),
            ({}, None),
        ):
            async with session.get("/v1/models", headers=sent) as answer:
                assert answer.status == 200
                assert answer.headers.get("x-client-request-id") == repeated
                assert answer.headers["x-request-id"].startswith("req_")
        async with session.get("/v1/models/none", headers={"x-client-request-id": "of-a-404"}) as answer:
            assert answer.headers["x-client-request-id"] == "of-a-404"


async def test_without_origins_nothing_is_said_of_them(redis_socket: Path, tmp_path: Path) -> None:
    async with (
        running_gateway(tmp_path / "home", emptied(redis_socket, 2)) as gateway,
        gateway.session("") as session,
        session.options(CHAT, headers=ASK) as answer,
    ):
        assert answer.status == 401
        assert not [name for name in answer.headers if name.lower().startswith("access-control")]
        assert "vary" not in answer.headers


@pytest.mark.parametrize("value", ["*", "https://*.example", "app.example", "https://app.example/", "https://a b"])
async def test_origins_are_whole_and_no_wildcards(value: str) -> None:
    with pytest.raises(SettingsError, match="HEADGATE_CORS_ORIGINS"):
        load({"HEADGATE_HOME": "/nowhere", "HEADGATE_CORS_ORIGINS": value})
    found = load({"HEADGATE_HOME": "/nowhere", "HEADGATE_CORS_ORIGINS": "https://a.example, http://[::1]:3000"})
    assert found.cors_origins == ("https://a.example", "http://[::1]:3000")
