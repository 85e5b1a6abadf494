"""`/v1/responses` over a WebSocket: turns, refusals, clients that leave, and what is charged for each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fakes import ScriptedWorker
from gateways import MODEL, RunningGateway, running_gateway, until
from openai.types.responses.responses_server_event import ResponseWsError

from gateway.base.app_keys import LIFECYCLE
from gateway.intake.intake import INTAKE
from gateway.routes.response_socket import MAX_PINGS

PATH = "/v1/responses"
ASKED = {"type": "response.create", "model": MODEL, "input": "hi", "store": False, "max_output_tokens": 8}


async def turn(socket: aiohttp.ClientWebSocketResponse, **fields: Any) -> list[dict[str, Any]]:
    """The events that answer one message."""
    await socket.send_json(ASKED | fields)
    return await events_of(socket)


async def events_of(socket: aiohttp.ClientWebSocketResponse) -> list[dict[str, Any]]:
    events = []
    while not events or events[-1]["type"] not in ("error", "response.completed", "response.incomplete"):
        events.append(json.loads((await socket.receive(timeout=20)).data))
    return events


async def test_each_message_is_a_request_of_its_own(gateway: RunningGateway) -> None:
    async with gateway.session() as session, session.ws_connect(PATH) as socket:
        first = await turn(socket)
        id = first[-1]["response"]["id"]
        second = await turn(socket, previous_response_id=id, input="and?", stream=True, background=False)
    assert [event["sequence_number"] for event in second] == list(range(len(second)))
    ends = [events[-1]["response"] for events in (first, second)]
    assert ends[1]["previous_response_id"] == ends[0]["id"]
    assert ends[1]["usage"]["input_tokens"] > ends[0]["usage"]["input_tokens"] + 8
    assert ends[1]["usage"]["input_tokens_details"]["cached_tokens"] > 0
    await gateway.balanced()
    rows = await gateway.sql("SELECT request_id, cache_read + cache_write + uncached, output FROM ledger_entry")
    assert sorted(rows) == sorted(
        (end["headgate"]["request_id"], end["usage"]["input_tokens"], end["usage"]["output_tokens"]) for end in ends
    )


@pytest.mark.asyncio(loop_scope="module")
async def test_refusals_are_events_and_the_connection_goes_on(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.session() as session, session.ws_connect(PATH) as socket:
        await socket.send_str("{")
        (error,) = await events_of(socket)
        assert (error["status"], error["error"]["code"]) == (400, "invalid_json")
        (error,) = await turn(socket, model="unknown")
        assert (error["status"], error["error"]["code"]) == (404, "model_not_found")
        (error,) = await turn(socket, previous_response_id="resp_none")
        assert error["error"]["code"] == "previous_response_not_found"
        (error,) = await turn(socket, prompt_cache_options={"prewarm": True})
        assert error["error"]["param"] == "prompt_cache_options.prewarm"
        assert (await turn(socket))[0]["type"] == "response.created"


@pytest.mark.asyncio(loop_scope="module")
async def test_events_name_the_lane_that_asked(shared_gateway: RunningGateway) -> None:
    """The lanes of OpenAI's clients wait for events with their name, and got none."""
    async with shared_gateway.session() as session, session.ws_connect(PATH) as socket:
        for lane in ("a", "b", None):
            await socket.send_json(ASKED | {"stream_id": lane})
        for lane in ("a", "b", None):
            assert {event.get("stream_id") for event in await events_of(socket)} == {lane}
        for refused in ({"model": "unknown"}, {"stream": False}):
            (error,) = await turn(socket, stream_id="a", **refused)
            assert ResponseWsError.model_validate(error).stream_id == "a"
        (error,) = await turn(socket, stream_id="a b")
        assert (error["status"], error["error"]["param"]) == (400, "stream_id")


async def test_a_refusal_says_when_to_come_again(bare_gateway: RunningGateway) -> None:
    async with bare_gateway.session() as session, session.ws_connect(PATH) as socket:
        (error,) = await turn(socket)  # there is no worker
    assert error["error"]["code"] == "no_worker"
    assert ResponseWsError.model_validate(error).error.headers == {"retry-after": "1", "retry-after-ms": "1000"}


async def test_a_stored_response_is_gone_on_from_on_another_connection(gateway: RunningGateway) -> None:
    async with gateway.session() as session:
        async with session.ws_connect(PATH) as socket:
            stored = (await turn(socket, store=True))[-1]["response"]["id"]
            unstored = (await turn(socket))[-1]["response"]["id"]
        async with session.ws_connect(PATH) as socket:
            assert (await turn(socket, previous_response_id=stored))[-1]["type"] != "error"
            assert (await turn(socket, previous_response_id=unstored))[-1]["type"] == "error"


async def test_a_client_that_leaves_ends_its_request(gateway: RunningGateway, worker: Any) -> None:
    async with gateway.session() as session, session.ws_connect(PATH) as socket:
        worker.runner.step_s = 0.05
        await socket.send_json(ASKED | {"max_output_tokens": 1000})
        while json.loads((await socket.receive(timeout=20)).data)["type"] != "response.output_text.delta":
            pass
    await gateway.balanced()
    ((output,),) = await gateway.sql("SELECT output FROM ledger_entry")
    assert 0 < output < 1000


async def test_a_revoked_key_is_refused_on_an_open_connection(gateway: RunningGateway) -> None:
    _, key = await gateway.new_tenant("revoked")
    async with gateway.session(key) as session, session.ws_connect(PATH) as socket:
        assert (await turn(socket))[-1]["type"] != "error"
        key_id = (await gateway.sql("SELECT id FROM api_key ORDER BY created_at DESC, id DESC"))[0][0]
        async with (
            gateway.session(gateway.keys.admin_key) as operator,
            operator.patch(f"/admin/v1/keys/{key_id}", json={"disabled": True}) as answer,
        ):
            assert answer.status == 200, await answer.text()
        for _ in range(40):
            (*_, last) = await turn(socket)
            if last["type"] == "error":
                break
            await asyncio.sleep(0.2)
        assert last["status"] == 401


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("key", "status"), [("", 401), (None, 400)])
async def test_what_is_no_handshake_is_a_plain_error(
    shared_gateway: RunningGateway, key: str | None, status: int
) -> None:
    async with shared_gateway.session(key) as session, session.get(PATH) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_messages_that_are_not_text_or_too_many_close_the_connection(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.session() as session:
        async with session.ws_connect(PATH) as socket:
            await socket.send_bytes(b"x")
            assert (await socket.receive(timeout=20)).type is aiohttp.WSMsgType.CLOSE
        async with session.ws_connect(PATH) as socket:
            for _ in range(30):
                await socket.send_json(ASKED)
            kinds = []
            while not kinds or kinds[-1] not in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED):
                kinds.append((await socket.receive(timeout=20)).type)
            assert socket.close_code == aiohttp.WSCloseCode.POLICY_VIOLATION


@pytest.mark.asyncio(loop_scope="module")
async def test_attack_A18_messages_are_decoded_within_the_bounds_of_a_body(shared_gateway: RunningGateway) -> None:
    """They were decoded on the loop, uncounted, and a deep one ended the connection."""
    bombs = {"invalid_json": "[" * 100_000, "too_many_values": "[" + "[]," * 400_000 + "[]]"}
    async with shared_gateway.session() as session, session.ws_connect(PATH) as socket:
        for code, bomb in bombs.items():
            await socket.send_str(bomb)
            (error,) = await events_of(socket)
            assert (error["status"], error["error"]["code"]) == (400, code)
        assert (await turn(socket))[0]["type"] == "response.created"


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", [aiohttp.WSMsgType.PING, aiohttp.WSMsgType.PONG])
async def test_attack_A18_a_flood_of_pings_ends_its_connection(
    shared_gateway: RunningGateway, kind: aiohttp.WSMsgType
) -> None:
    async with shared_gateway.session() as session:
        async with session.ws_connect(PATH) as socket:
            for _ in range(500):
                await socket.ping()
            assert (await turn(socket))[0]["type"] == "response.created"
        async with session.ws_connect(PATH) as socket:
            with contextlib.suppress(ConnectionError):
                for _ in range(2 * MAX_PINGS):
                    await (socket.ping() if kind is aiohttp.WSMsgType.PING else socket.pong())
            await socket.receive(timeout=20)
            assert socket.close_code == aiohttp.WSCloseCode.ABNORMAL_CLOSURE


async def test_attack_A18_messages_that_wait_are_held_bytes_of_their_tenant(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake = gateway.app[INTAKE]
    monkeypatch.setattr(intake, "_most_held", 3000)
    async with gateway.session() as session, session.ws_connect(PATH) as socket:
        await socket.send_json(ASKED | {"input": "x" * 2000})
        assert (await socket.receive(timeout=20)).type is aiohttp.WSMsgType.CLOSE
        assert socket.close_code == aiohttp.WSCloseCode.TRY_AGAIN_LATER
    async with gateway.session() as session, session.ws_connect(PATH) as socket:
        for _ in range(4):
            await socket.send_json(ASKED)
        for _ in range(4):
            assert (await events_of(socket))[0]["type"] == "response.created"
        await socket.send_json(ASKED)
        await socket.send_json(ASKED)  # it waits when the client leaves
    await until(lambda: intake.num_held == 0)


async def test_a_fault_in_a_turn_closes_the_connection_and_is_logged(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was closed as if the server stopped, and nothing said why."""

    def body_of(*_: Any) -> None:
        raise RuntimeError("a fault of a turn")

    monkeypatch.setattr("gateway.routes.response_socket.Connection.body_of", body_of)
    async with gateway.session() as session, session.ws_connect(PATH) as socket:
        await socket.send_json(ASKED)
        assert (await socket.receive(timeout=20)).type is aiohttp.WSMsgType.CLOSE
        assert socket.close_code == aiohttp.WSCloseCode.INTERNAL_ERROR
    await until(lambda: any(one.message == "unhandled_exception" for one in caplog.records))


async def test_a_gateway_that_stops_answers_and_closes(gateway: RunningGateway) -> None:
    async with gateway.session() as session, session.ws_connect(PATH) as socket:
        await socket.send_json(ASKED | {"max_output_tokens": 200})
        assert json.loads((await socket.receive(timeout=20)).data)["type"] == "response.created"
        gateway.app[LIFECYCLE].draining.set()
        assert (await events_of(socket))[-1]["type"] in ("response.completed", "response.incomplete")
        assert (await socket.receive(timeout=20)).type is aiohttp.WSMsgType.CLOSE
        assert socket.close_code == aiohttp.WSCloseCode.GOING_AWAY


async def test_attack_A07_a_socket_whose_client_does_not_read_holds_up_nobody(tmp_path: Path, redis_url: str) -> None:
    """The gateway's loop turned for ever in the wait for such a client, and every tenant's requests stood still."""
    async with (
        running_gateway(tmp_path / "home", redis_url, write_timeout_s=0.4) as gateway,
        ScriptedWorker(tmp_path / "w0.sock", redis_url=redis_url, journal_dir=tmp_path / "w0") as worker,
    ):
        await gateway.workers(1)
        worker.runner.step_s = 0.002  # an event each time, so that the wait is between two of them
        _, key = await gateway.new_tenant("neighbour")
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", gateway.port))
        asked = ASKED | {"max_output_tokens": 1900, "include": ["message.output_text.logprobs"], "top_logprobs": 20}
        deaf.sendall(_handshake(gateway.keys.api_key) + _frame(json.dumps(asked).encode()))
        await until(lambda: bool(worker.engine.attempts))
        async with gateway.session(key) as neighbour:
            while worker.engine.attempts:
                async with neighbour.get("/v1/models", timeout=aiohttp.ClientTimeout(total=10)) as answer:
                    assert answer.status == 200
                await asyncio.sleep(0.05)
        assert worker.num_tokens_sent < 1900
        await gateway.balanced()
        [(outcome,)] = await gateway.sql("SELECT outcome FROM ledger_entry WHERE kind = 'settle'")
        assert outcome == "client_gone"
        deaf.close()


def _handshake(key: str) -> bytes:
    return (
        f"GET {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    ).encode()


def _frame(text: bytes) -> bytes:
    """A text frame of a client, masked with zeros."""
    assert 126 <= len(text) < 2**16
    return b"\x81\xfe" + len(text).to_bytes(2, "big") + bytes(4) + text


async def _raw(gateway: RunningGateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await gateway.socket()
    writer.write(_handshake(gateway.keys.api_key))
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    return reader, writer


async def _ends(reader: asyncio.StreamReader, limit_s: float) -> bool:
    """Whether the connection ends in time."""
    try:
        async with asyncio.timeout(limit_s):
            while await reader.read(4096):
                pass
    except TimeoutError:
        return False
    except ConnectionError:
        pass
    return True


async def test_attack_A18_a_message_that_never_ends_is_counted_and_ended(tmp_path: Path, redis_url: str) -> None:
    """All but one byte of a message lay in the gateway for as long as its client liked, and counted nowhere."""
    num_bytes = 3 * 2**20
    async with running_gateway(tmp_path / "home", redis_url, body_s=0.5) as gateway:
        intake = gateway.app[INTAKE]
        _, writer = await _raw(gateway)
        writer.write(b"\x81\xff" + (num_bytes + 1).to_bytes(8, "big") + bytes(4) + b"x" * num_bytes)
        await until(lambda: intake.num_held == num_bytes)
        slow, trickle = await _raw(gateway)
        trickle.write(b"\x81\xff" + (num_bytes).to_bytes(8, "big") + bytes(4) + b"x")
        started = asyncio.get_running_loop().time()
        assert await _ends(slow, 10)
        assert asyncio.get_running_loop().time() - started > 0.35
        await until(lambda: intake.num_held == num_bytes)  # it has kept a rate until now
        writer.close()
        await until(lambda: not intake.num_held)
        idle, other = await _raw(gateway)
        other.write(b"\x89\x80" + bytes(4))
        assert await idle.readexactly(2) == b"\x8a\x00"
        assert not await _ends(idle, 1), "nothing of a message has come"
        other.close()
        trickle.close()


async def test_a_message_that_is_too_large_is_closed_with_a_code_that_its_client_sees(
    tmp_path: Path, redis_url: str
) -> None:
    """The connection was reset while the client still sent, so it saw no code."""
    num_bytes = 8 * 2**20
    async with running_gateway(tmp_path / "home", redis_url, json_body_bytes=2**20) as gateway:
        intake = gateway.app[INTAKE]
        reader, writer = await _raw(gateway)
        writer.write(b"\x81\xff" + num_bytes.to_bytes(8, "big") + bytes(4))
        for _ in range(num_bytes // 2**16):
            writer.write(b"x" * 2**16)
            await writer.drain()
        head = await reader.readexactly(4)
        assert head[0] == 0x88
        assert int.from_bytes(head[2:], "big") == aiohttp.WSCloseCode.MESSAGE_TOO_BIG
        assert not intake.num_held
        writer.write_eof()
        assert await _ends(reader, 5)
        writer.close()


async def _sends_on(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def test_attack_A18_a_client_that_sends_on_after_the_close_is_dropped(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.http.http_limits.LINGERING_S", 0.5)
    async with running_gateway(tmp_path / "home", redis_url, json_body_bytes=2**20) as gateway:
        server = gateway.runner.server
        assert server is not None
        _, writer = await _raw(gateway)
        writer.write(b"\x81\xff" + (2**30).to_bytes(8, "big") + bytes(4))
        sends = asyncio.create_task(_sends_on(writer))
        await until(lambda: not server.connections)
        sends.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await sends
        writer.close()


async def test_attack_A18_messages_that_are_not_whole_are_held_bytes_of_their_tenant(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway.app[INTAKE], "_most_held", 3000)
    reader, writer = await _raw(gateway)
    writer.write(b"\x01\xfe" + (2000).to_bytes(2, "big") + bytes(4) + b"x" * 2000)
    assert await _ends(reader, 5)
    await until(lambda: not gateway.app[INTAKE].num_held)
    writer.close()


async def test_attack_A18_a_part_of_a_message_beside_a_handshake_that_fails_is_held_no_longer(
    gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each such connection left its bytes counted for ever."""

    async def fails(socket: web.WebSocketResponse, request: web.Request) -> None:
        request.protocol.message_watch(b"\x81\xfe" + (2000).to_bytes(2, "big") + bytes(4) + b"x" * 1000)
        assert gateway.app[INTAKE].num_held >= 1000
        raise ConnectionResetError

    monkeypatch.setattr(web.WebSocketResponse, "prepare", fails)
    async with gateway.session() as session:
        with pytest.raises(aiohttp.ClientError):
            await session.ws_connect(PATH)
    await until(lambda: not gateway.app[INTAKE].num_held)


@pytest.mark.asyncio(loop_scope="module")
async def test_attack_A18_a_flood_of_empty_parts_ends_its_connection(shared_gateway: RunningGateway) -> None:
    """Parts without an end never became a message, so nothing counted them."""
    reader, writer = await _raw(shared_gateway)
    writer.write(b"\x01\x80" + bytes(4))
    for _ in range(10):
        writer.write((b"\x00\x80" + bytes(4)) * 1000)
    assert await _ends(reader, 5)
    writer.close()


async def test_attack_A18_what_a_silent_connection_keeps_is_held_as_a_body_is(gateway: RunningGateway) -> None:
    held = gateway.app[INTAKE]
    async with gateway.session() as session, session.ws_connect(PATH) as socket:
        first = (await turn(socket, input="x" * 1_200))[-1]["response"]["id"]
        await until(lambda: 1_200 < held.num_held < 6_000)
        assert (await turn(socket, previous_response_id=first, input="and?"))[-1]["type"] != "error"
        (error,) = await turn(socket, model="unknown", input="y" * 9_000)
        assert error["status"] == 404
        await until(lambda: 1_200 < held.num_held < 6_000)
    await until(lambda: not held.num_held)
