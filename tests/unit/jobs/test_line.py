"""Every answer of a gateway means something."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from opentelemetry.trace import INVALID_SPAN

from accounting.values.types import Usage
from workers.jobs.base.tracing import ChunkTrace
from workers.jobs.batches.line import Answered, Closed, Failed, Later, Sender, Stopped, judge
from workers.jobs.batches.pace import FIRST, MOST, Pace


def error(code: str | None, kind: str = "x") -> bytes:
    return json.dumps({"error": {"code": code, "message": "why", "type": kind, "param": None}}).encode()


UNTRACED = ChunkTrace(INVALID_SPAN)
NEVER = {"x-should-retry": "false"}


@pytest.mark.parametrize(
    ("status", "headers", "content", "outcome"),
    [
        (400, {}, error("invalid_value"), Answered),
        (404, {}, error("model_not_found"), Answered),
        (403, {}, error("model_not_allowed"), Answered),
        (401, {}, error("invalid_api_key"), Stopped),
        (403, {}, error("tenant_suspended"), Stopped),
        (403, {}, error("project_archived"), Stopped),
        (429, NEVER, error("insufficient_quota"), Stopped),
        (429, {"retry-after": "2"}, error("rate_limit_exceeded"), Later),
        (503, {"retry-after-ms": "20"}, error("overloaded"), Later),
        (409, {"retry-after": "1"}, error("idempotency_in_progress"), Later),
        (409, NEVER, error("batch_line_ended"), Closed),
        (422, {}, error("idempotency_mismatch"), Answered),
        (500, NEVER, error("request_quarantined"), Answered),
        (403, {}, error("price_unknown"), Answered),
        (500, {}, error("internal_error"), Failed),
        (502, {}, b"<html>bad gateway</html>", Failed),
        (503, {}, b"", Failed),
        (408, {}, error("request_timeout"), Failed),
        (200, {}, b"<html>", Failed),
        (200, {}, b"{}", Answered),
    ],
)
def test_an_answer_is_judged(status, headers, content, outcome):
    assert isinstance(judge(status, headers, content), outcome)


def test_waits_are_honoured_and_bounded():
    assert judge(503, {"retry-after-ms": "250", "retry-after": "1"}, b"") == Later(0.25, busy=True)
    assert judge(409, {"retry-after": "1"}, b"") == Later(1.0, busy=False)
    assert judge(429, {"retry-after": "86400"}, b"").wait_s == 60
    assert isinstance(judge(429, {"retry-after": "soon"}, b""), Failed)


def test_a_good_answer_brings_its_usage_and_no_newline():
    usage = {"prompt_tokens": 20, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 16}}
    content = json.dumps({"usage": usage, "text": "a\nb"}, indent=2).encode()
    outcome = judge(200, {"x-request-id": "req_new"}, content)
    assert outcome.usage == Usage(cache_read=16, uncached=4, output=5)
    assert b"\n" not in outcome.body
    assert json.loads(outcome.body)["text"] == "a\nb"


def test_the_original_request_is_named_when_an_answer_is_replayed():
    content = b'{"headgate": {"request_id": "req_first"}}'
    assert judge(200, {"x-request-id": "req_replay"}, content).request_id == "req_first"
    assert judge(200, {"x-request-id": "req_only"}, b"{}").request_id == "req_only"


async def test_a_gateway_that_is_away_costs_no_try(free_port):
    async with aiohttp.ClientSession() as session:
        sender = Sender(session, f"http://127.0.0.1:{free_port}/", "hg_batch_x", "batch_1", UNTRACED)
        assert await sender.send(1, b"{}") == Later(1.0, busy=True)


async def test_a_connection_that_breaks_costs_one_try():
    async def hang_up(reader, writer):
        await reader.readline()
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, aiohttp.ClientSession() as session:
        sender = Sender(session, f"http://127.0.0.1:{port}/", "hg_batch_x", "batch_1", UNTRACED)
        assert (await sender.send(1, b"{}")).code == "connection_lost"


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_the_pace_grows_by_one_a_round_and_halves_once_a_busy_moment():
    pace = Pace()
    for _ in range(FIRST):
        pace.clean()
    assert pace.limit == FIRST + 1
    started = pace.round
    for _ in range(5):
        pace.busy(started)
    assert pace.limit == (FIRST + 1) // 2
    for _ in range(20):
        pace.busy(pace.round)
    assert pace.limit == 1
    for _ in range(10_000):
        pace.clean()
    assert pace.limit == MOST


def test_an_answer_in_anthropics_shape_has_its_usage() -> None:
    told = b'{"type":"message","usage":{"input_tokens":3,"cache_creation_input_tokens":2,"cache_read_input_tokens":5,"output_tokens":7}}'
    answered = judge(200, {}, told)
    assert isinstance(answered, Answered)
    assert answered.usage == Usage(cache_read=5, cache_write=2, uncached=3, output=7)


def test_an_answer_of_chat_tells_what_was_written_to_the_cache() -> None:
    details = b'"prompt_tokens_details":{"cached_tokens":5,"cache_write_tokens":2}'
    told = b'{"object":"chat.completion","usage":{"prompt_tokens":8,' + details + b',"completion_tokens":7}}'
    answered = judge(200, {}, told)
    assert isinstance(answered, Answered)
    assert answered.usage == Usage(cache_read=5, cache_write=2, uncached=1, output=7)


def test_an_answer_in_the_shape_of_responses_has_its_usage() -> None:
    details = b'"input_tokens_details":{"cached_tokens":5,"cache_write_tokens":2}'
    told = b'{"object":"response","usage":{"input_tokens":8,' + details + b',"output_tokens":7,"total_tokens":15}}'
    answered = judge(200, {}, told)
    assert isinstance(answered, Answered)
    assert answered.usage == Usage(cache_read=5, cache_write=2, uncached=1, output=7)
