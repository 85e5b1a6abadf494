"""Attacks on HTTP itself (security.md section 8, A): raw bytes against a real listener."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any

import pytest
from gateways import MODEL, RunningGateway, running_gateway, until
from load import stretched

from gateway.http.http_limits import GatewayRunner

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def talk(gateway: RunningGateway, data: bytes, limit_s: float = 5.0) -> bytes:
    """Sends bytes on a socket of its own and reads to the end of the connection."""
    reader, writer = await gateway.socket()
    try:
        writer.write(data)
        await writer.drain()
        async with asyncio.timeout(stretched(limit_s)):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def get(path: str = "/livez", *headers: str, host: str = "host: x", version: str = "HTTP/1.1") -> bytes:
    lines = [f"GET {path} {version}", *([host] if host else []), *headers, "connection: close"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


def num_answers(answer: bytes) -> int:
    return answer.count(b"HTTP/1.")


def check_error(answer: bytes) -> dict[str, Any]:
    """Our shape and our headers, without a word of the server's."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"x-request-id: req_" in head.lower()
    assert b"openai-version: 2020-10-01" in head.lower()
    assert b"openai-processing-ms" in head.lower()
    assert b"aiohttp" not in answer.lower()
    assert b"python" not in answer.lower()
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


SMUGGLE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    "lines",
    [
        "content-length: 5\r\ntransfer-encoding: chunked",
        "content-length: 5\r\ncontent-length: 6",
        "content-length: 5\r\ncontent-length: 5",
        "transfer-encoding: xchunked",
        "transfer-encoding:\tchunked, identity",
        "transfer-encoding: identity\r\n chunked",
        "content-length: +5",
        "content-length: 5,5",
        "content-length: -1",
        "content-length: 0x5",
    ],
)
async def test_attack_A01_ambiguous_framing_is_refused_and_never_two_requests(
    shared_gateway: RunningGateway, lines: str
) -> None:
    data = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{lines}\r\n\r\n".encode() + b"0\r\n\r\n" + SMUGGLE
    answer = await talk(shared_gateway, data)
    assert status_of(answer) == 400
    assert num_answers(answer) == 1
    check_error(answer)


@pytest.mark.parametrize(
    "data",
    [
        b"GET /livez HTTP/1.1\r\nhost: x\r\nx: a\x00b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\nx: a\x0bb\r\n\r\n",
        b"GET /liv\x00ez HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /livez\x0b HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /livez HTTP/1.1\nhost: x\n\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\nx : y\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nhost: x\r\n x: folded\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
async def test_attack_A02_control_characters_in_the_head_are_400(shared_gateway: RunningGateway, data: bytes) -> None:
    answer = await talk(shared_gateway, data)
    assert status_of(answer) == 400
    check_error(answer)


@pytest.mark.parametrize("kind", ["tiny chunks", "extension", "trailers"])
async def test_attack_A03_chunk_floods_are_refused_or_read_within_bounds(
    shared_gateway: RunningGateway, kind: str
) -> None:
    head = post_head(shared_gateway, "transfer-encoding: chunked")
    floods = {
        "tiny chunks": b"1\r\n \r\n" * 200_000 + b"0\r\n\r\n",
        "extension": b"1;" + b"x" * 1024 * 1024 + b"\r\na\r\n0\r\n\r\n",
        "trailers": b"1\r\n{\r\n0\r\n" + b"x: y\r\n" * 100_000 + b"\r\n",
    }
    started = time.process_time()
    answer = await talk(shared_gateway, head + floods[kind], 20)
    assert status_of(answer) in {400, 413, 0}
    assert time.process_time() - started < 5


@pytest.mark.parametrize("size", [1, 32])
async def test_attack_A03_a_body_in_tiny_chunks_is_ended_long_before_its_end(
    shared_gateway: RunningGateway, size: int
) -> None:
    """Twelve bodies of 300,000 chunks of one byte kept the loop from everything else for seconds."""
    head = post_head(shared_gateway, "transfer-encoding: chunked")
    body = b'{"model":"x","messages":[{"role":"user","content":"' + b"x" * 64_000 * size + b'"}]}'
    reader, writer = await shared_gateway.socket()
    writer.write(head)
    await writer.drain()
    for start in range(0, len(body), 1000 * size):
        pieces = (body[at : at + size] for at in range(start, min(start + 1000 * size, len(body)), size))
        writer.write(b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in pieces))
    async with asyncio.timeout(20):
        answer = await reader.read(4096)  # without the chunk that ends the body
    writer.close()
    assert status_of(answer) == 400
    assert "small chunks" in check_error(answer)["message"]


async def test_attack_A03_a_body_in_chunks_of_a_kibibyte_or_few_tiny_ones_is_read(
    shared_gateway: RunningGateway,
) -> None:
    head = post_head(shared_gateway, "transfer-encoding: chunked")
    body = b'{"model":"nobody","messages":[{"role":"user","content":"' + b"x" * 200_000 + b'"}]}'
    for size, sent in ((1024, body), (64, body), (1, body[-1500:].replace(b"x" * 1440, b'{"model":"nobody","a":"'))):
        chunks = [sent[at : at + size] for at in range(0, len(sent), size)]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in chunks) + b"0\r\n\r\n"
        answer = await talk(shared_gateway, head + framed, 20)
        assert "small chunks" not in check_error(answer)["message"]


def post_head(gateway: RunningGateway, *headers: str, path: str = "/v1/chat/completions") -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "host: x",
        f"authorization: Bearer {gateway.keys.api_key}",
        "content-type: application/json",
        "connection: close",
        *headers,
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


@pytest.mark.parametrize(
    "headers", [["x: " + "a" * 1024 * 1024], [f"x-{i}: y" for i in range(140)], ["x: " + "a" * 8200]]
)
async def test_attack_A04_large_heads_are_431(shared_gateway: RunningGateway, headers: list[str]) -> None:
    answer = await talk(shared_gateway, get("/livez", *headers))
    if answer:  # the rest that nobody reads may reset the connection before the answer is seen
        assert status_of(answer) == 431
        assert check_error(answer)["code"] == "headers_too_large"
    else:
        assert len(headers[0]) > 100_000


async def test_attack_A05_pipelined_requests_are_answered_in_order_by_a_bounded_queue(
    shared_gateway: RunningGateway,
) -> None:
    reader, writer = await shared_gateway.socket()
    writer.write(SMUGGLE * 3000)
    seen = b""
    while seen.count(b"HTTP/1.1 200 OK") < 3000:
        async with asyncio.timeout(stretched(15)):
            seen += await reader.read(1 << 20)
    writer.close()


async def test_attack_A06_slow_heads_and_bodies_get_408(tmp_path: Path, redis_url: str) -> None:
    timers = {"first_byte_s": 0.3, "headers_s": 0.5, "body_s": 0.5}
    async with running_gateway(tmp_path / "home", redis_url, **timers) as gateway:
        started, answer = await _trickle(gateway)
        assert status_of(answer) == 408
        assert check_error(answer)["code"] == "request_timeout"
        assert 0.3 < time.monotonic() - started < stretched(2)
        answer = await talk(gateway, post_head(gateway, "content-length: 1000") + b'{"model":')
        assert status_of(answer) == 408
        assert check_error(answer)["code"] == "request_timeout"
        # Nothing sent at all: closed without a word.
        assert await talk(gateway, b"") == b""


async def _trickle(gateway: RunningGateway) -> tuple[float, bytes]:
    """Sends a head byte by byte; returns when it began, and the answer. On a machine that stalls, the answer may come
    before the last byte, which resets the connection under it: then it begins again."""
    while True:
        reader, writer = await gateway.socket()
        with contextlib.suppress(ConnectionError), contextlib.closing(writer):
            writer.write(b"GET /livez HTTP/1.1\r\nhost")
            started = time.monotonic()
            for _ in range(4):
                await asyncio.sleep(0.1)
                writer.write(b"a")
            return started, await reader.read()


async def test_a_keep_alive_connection_may_rest_longer_than_a_new_one(tmp_path: Path, redis_url: str) -> None:
    async with running_gateway(tmp_path / "home", redis_url, first_byte_s=0.2, headers_s=0.4) as gateway:
        reader, writer = await gateway.socket()
        for _ in range(2):
            writer.write(SMUGGLE)
            assert b"200 OK" in await reader.readuntil(b'ok"}')
            await asyncio.sleep(0.6)
        writer.close()


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "nonsense"])
async def test_attack_A08_encoded_bodies_are_415(shared_gateway: RunningGateway, encoding: str) -> None:
    body = b"\x1f\x8b" + b"\0" * 1000
    head = post_head(shared_gateway, f"content-encoding: {encoding}", f"content-length: {len(body)}")
    answer = await talk(shared_gateway, head + body)
    assert status_of(answer) == 415
    assert check_error(answer)["code"] == "unsupported_media_type"


async def test_attack_A09_too_large_a_body_is_413_before_it_is_read(shared_gateway: RunningGateway) -> None:
    too_long = 16 * 1024 * 1024 + 1
    answer = await talk(shared_gateway, post_head(shared_gateway, f"content-length: {too_long}"))
    assert status_of(answer) == 413
    assert check_error(answer)["code"] == "request_too_large"
    answer = await talk(
        shared_gateway, post_head(shared_gateway, f"content-length: {too_long}", "expect: 100-continue")
    )
    assert answer.startswith(b"HTTP/1.1 413")
    chunks = (b"100000\r\n" + b" " * 0x100000 + b"\r\n") * 17
    answer = await talk(shared_gateway, post_head(shared_gateway, "transfer-encoding: chunked") + chunks, 20)
    assert status_of(answer) in {413, 0}  # the rest of the body may reset the connection


async def test_a_client_that_still_sends_sees_why_its_body_was_refused(shared_gateway: RunningGateway) -> None:
    """The connection is not reset while the client, on a busy machine, sends what it had begun."""
    reader, writer = await shared_gateway.socket()
    writer.write(post_head(shared_gateway, f"content-length: {1 << 30}"))
    for _ in range(12):
        await asyncio.sleep(0.2)
        writer.write(b"x" * 1000)
        await writer.drain()
    answer = await reader.readuntil(b"\r\n\r\n")
    assert status_of(answer) == 413
    assert b"\r\nconnection: close\r\n" in answer.lower()  # else its next request may meet a connection that closes
    await reader.read()  # closed, once nothing more comes
    writer.close()


async def test_a_wanted_body_is_continued(shared_gateway: RunningGateway) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1})
    reader, writer = await shared_gateway.socket()
    writer.write(post_head(shared_gateway, f"content-length: {len(body)}", "expect: 100-continue"))
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body.encode())
    assert status_of(await reader.read()) == 200
    writer.close()


@pytest.mark.parametrize("framing", ["content-length: 1000", "transfer-encoding: chunked"])
async def test_a_client_that_ends_its_half_before_the_end_of_the_body_is_told(
    shared_gateway: RunningGateway, framing: str
) -> None:
    reader, writer = await shared_gateway.socket()
    begun = b'{"model":' if "length" in framing else b'9\r\n{"model":\r\n'
    writer.write(post_head(shared_gateway, framing) + begun)
    await writer.drain()
    writer.write_eof()
    answer = await reader.read()  # to the end: the connection is closed after the answer
    assert status_of(answer) == 400
    assert "before the end" in check_error(answer)["message"]
    writer.close()


async def test_a_body_that_ends_early_and_that_nobody_reads_is_no_fault(
    shared_gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has no key could fill the log with errors."""
    reader, writer = await shared_gateway.socket()
    head = post_head(shared_gateway, "content-length: 1000").replace(b"Bearer hg_", b"Bearer xx_")
    writer.write(head + b'{"model":')
    await writer.drain()
    answer = await reader.read()  # the server's half ends behind the answer
    writer.write_eof()
    assert status_of(answer) == 401
    writer.close()
    await asyncio.sleep(0.2)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_stream_before_a_request_that_ends_early_is_whole(
    shared_gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "stream": True}
    first = json.dumps(body).encode()
    head = post_head(shared_gateway, f"content-length: {len(first)}").replace(b"connection: close\r\n", b"")
    reader, writer = await shared_gateway.socket()
    writer.write(head + first + post_head(shared_gateway, "content-length: 1000") + b'{"model":')
    await writer.drain()
    writer.write_eof()
    answer = await reader.read()
    assert status_of(answer) == 200
    assert b"data: [DONE]" in answer
    writer.close()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("expected", "status"), [("200-foo", 417), ("100-continue, 200-foo", 417), ("100-Continue", 200)]
)
async def test_what_is_expected_and_not_known_is_417(
    shared_gateway: RunningGateway, expected: str, status: int
) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
    head = post_head(shared_gateway, f"content-length: {len(body)}", f"expect: {expected}")
    answer = (await talk(shared_gateway, head + body)).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert status_of(answer) == status
    if status == 417:
        assert check_error(answer)["code"] == "expectation_failed"


async def test_what_http_1_0_expects_is_ignored(shared_gateway: RunningGateway) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
    for expected in ("100-continue", "other"):
        head = post_head(shared_gateway, f"content-length: {len(body)}", f"expect: {expected}")
        answer = await talk(shared_gateway, head.replace(b"HTTP/1.1", b"HTTP/1.0") + body)
        assert status_of(answer) == 200, answer


@pytest.mark.parametrize("name", ["x-headgate-quote", "traceparent", "tracestate", "user-agent", "x-client-request-id"])
async def test_attack_A19_headers_that_are_no_text_are_refused_or_without_effect(
    shared_gateway: RunningGateway, name: str
) -> None:
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}).encode()
    head = post_head(shared_gateway, f"content-length: {len(body)}", f"{name}: VALUE").replace(b"VALUE", b"\xff\xfe")
    assert status_of(await talk(shared_gateway, head + body)) == (400 if name == "x-headgate-quote" else 200)


async def test_attack_A10_nothing_of_the_clients_splits_a_header(shared_gateway: RunningGateway) -> None:
    fields = {"a\r\nx-evil: 1": 1, "b\u2028c": 1, "ok_name": 1, "d\x85e": 1}
    body = json.dumps(
        {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}
    ).encode()
    answer = await talk(shared_gateway, post_head(shared_gateway, f"content-length: {len(body)}") + body)
    head = answer.partition(b"\r\n\r\n")[0]
    assert b"x-headgate-ignored: ok_name" in head
    assert b"evil" not in head


async def test_attack_A11_forwarding_headers_change_nothing(shared_gateway: RunningGateway) -> None:
    for header in (
        "x-forwarded-for: 127.0.0.1",
        "forwarded: for=127.0.0.1",
        "x-real-ip: 127.0.0.1",
        "x-original-url: /livez",
        "x-http-method-override: POST",
    ):
        assert status_of(await talk(shared_gateway, get("/v1/models", header))) == 401


@pytest.mark.parametrize(
    "path",
    [
        "//v1//models",
        "/v1/%2e%2e/metrics",
        "/v1/../metrics",
        "/v1/..;/metrics",
        "/V1/models",
        "/v1/models;a=b",
        "/v1%2fmodels",
        "/./v1/models",
        "/v1/models/",
        "http://example.org/v1/models",
        "/%00",
        "/v1/chat",
    ],
)
async def test_attack_A12_odd_paths_never_get_past_authentication(shared_gateway: RunningGateway, path: str) -> None:
    answer = await talk(shared_gateway, get(path, host="host: localhost"))
    assert status_of(answer) in {400, 401, 404}
    check_error(answer)
    key = f"authorization: Bearer {shared_gateway.keys.api_key}"
    answer = await talk(shared_gateway, get(path, key, host="host: localhost"))
    assert status_of(answer) in {400, 404} or path.startswith("http://")


async def test_attack_A13_a_missing_or_doubled_host_is_400(shared_gateway: RunningGateway) -> None:
    assert status_of(await talk(shared_gateway, get(host=""))) == 400
    answer = await talk(shared_gateway, get("/livez", "host: b"))
    assert status_of(answer) == 400
    check_error(answer)
    assert status_of(await talk(shared_gateway, get(host="host: whatever.example"))) == 200


@pytest.mark.parametrize(
    "data",
    [
        get("/livez", "upgrade: websocket", "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==", "sec-websocket-version: 13"),
        b"CONNECT example.org:443 HTTP/1.1\r\nhost: example.org:443\r\nconnection: close\r\n\r\n",
        b"TRACE /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /livez\r\n\r\n",
        b"GET /livez HTTP/0.9\r\nhost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
async def test_attack_A14_other_protocols_are_refused(shared_gateway: RunningGateway, data: bytes) -> None:
    answer = await talk(shared_gateway, data)
    # An upgrade that is not taken is an ordinary request.
    allowed = {200} if b"websocket" in data else {400, 401, 405}
    assert status_of(answer) in allowed
    assert b"101 Switching" not in answer


async def test_attack_A15_an_address_holds_a_bounded_number_of_connections(tmp_path: Path, redis_url: str) -> None:
    limits = {"unlimited_networks": (), "max_connections_per_address": 5}
    async with running_gateway(tmp_path / "home", redis_url, **limits) as gateway:
        held = [await gateway.socket() for _ in range(5)]
        for _, writer in held:
            writer.write(SMUGGLE)
        for reader, _ in held:
            assert b"200 OK" in await reader.readuntil(b'ok"}')
        assert await talk(gateway, SMUGGLE) == b""
        held.pop()[1].close()

        async def admitted() -> bool:
            return b"200 OK" in await talk(gateway, get())

        for _ in range(100):
            if await admitted():
                break
            await asyncio.sleep(0.01)
        else:
            raise AssertionError("a closed connection did not make room")
        for _, writer in held:
            writer.close()


async def test_wrong_methods_name_the_right_ones(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.session() as session:
        async with session.get("/v1/chat/completions") as answer:
            assert answer.status == 405
            assert answer.headers["allow"] == "POST"
            error = (await answer.json())["error"]
            assert error["code"] == "method_not_allowed"
            assert error["message"] == "GET /v1/chat/completions is not offered: use POST."
        async with session.get("/nothing/here") as answer:
            assert answer.status == 404
            assert answer.headers["openai-processing-ms"] == "0"
        async with session.post("/v1/chat/completions", data=b"{}") as answer:
            assert answer.status == 415


@pytest.mark.parametrize(
    ("method", "path", "shown"),
    [
        ("POST", "/v1/audio/speech", "POST /v1/audio/speech"),
        ("GET", "/v1/nothing?key=secret", "GET /v1/nothing"),
        ("GET", "/v1/%3Cb%3E%0A", "GET /v1/%3Cb%3E%0A"),
        ("GET", "/" + "x" * 500, "GET (this path)"),
    ],
)
async def test_o10_a_route_that_is_not_offered_is_named_with_what_is(
    shared_gateway: RunningGateway, method: str, path: str, shown: str
) -> None:
    key = f"authorization: Bearer {shared_gateway.keys.api_key}"
    head = get(path, key).replace(b"GET ", method.encode() + b" ", 1)
    answer = await talk(shared_gateway, head)
    assert status_of(answer) == 404
    error = check_error(answer)
    assert (error["type"], error["code"]) == ("invalid_request_error", "unknown_url")
    assert error["message"].startswith(f"Unknown request URL: {shown}. Headgate offers /v1/chat")
    assert "secret" not in error["message"]


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/openapi.json"])
async def test_b5_probes_answer_head_as_they_answer_get_but_for_the_body(
    shared_gateway: RunningGateway, path: str
) -> None:
    body = await talk(shared_gateway, get(path))
    head = await talk(shared_gateway, get(path).replace(b"GET ", b"HEAD ", 1))
    assert status_of(head) == status_of(body) == 200
    assert head.endswith(b"\r\n\r\n"), "no body"
    length = f"content-length: {len(body.partition(bytes(2 * [13, 10]))[2])}".encode()
    assert length in head.lower()


async def test_b5_head_needs_a_key_wherever_get_does(shared_gateway: RunningGateway) -> None:
    head = get("/v1/models").replace(b"GET ", b"HEAD ", 1)
    assert status_of(await talk(shared_gateway, head)) == 401


async def test_connections_are_counted_out_again(shared_gateway: RunningGateway) -> None:
    runner = shared_gateway.runner
    assert isinstance(runner, GatewayRunner)
    for _ in range(3):
        await talk(shared_gateway, get())
    await until(lambda: runner.server is not None and runner.server.addresses.total == 0)
