"""Messages through the unmodified `anthropic` client, the real gateway and the real protocol."""

from __future__ import annotations

import dataclasses
import datetime
import io
import re
from typing import Any

import anthropic
import pytest
from anthropic.types import MessageParam
from fakes import decode, expected_output
from gateways import MODEL, RunningGateway

from accounting.values.types import Limits
from gateway.generation.served.models import MODELS
from workers.protocol.messages import SamplingParams

pytestmark = pytest.mark.asyncio(loop_scope="module")

HELLO: list[MessageParam] = [{"role": "user", "content": "hello there"}]
PROMPT = [256, *b"user: hello there", 257, *b"\nassistant:"]
JSON = {"content-type": "application/json"}
GREEDY: dict[str, Any] = {"temperature": 0}


def client(gateway: RunningGateway, api_key: str | None = None, **options: Any) -> anthropic.AsyncAnthropic:
    options = {"max_retries": 0, "timeout": 20} | options
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=api_key or gateway.keys.api_key, **options)


def greedy(max_tokens: int, prompt: list[int] = PROMPT) -> str:
    return decode(expected_output(prompt, SamplingParams(seed=0, temperature=0.0), max_tokens))


async def test_a_message(shared_gateway: RunningGateway) -> None:
    async with client(shared_gateway) as anthropic_client:
        raw = await anthropic_client.messages.with_raw_response.create(
            model=MODEL, messages=HELLO, max_tokens=20, extra_body=GREEDY
        )
    message = await raw.parse()
    assert message.role == "assistant"
    assert message.model == MODEL
    assert message.id.startswith("msg_")
    [block] = message.content
    assert block.type == "text"
    assert block.text == greedy(20)
    assert message.stop_reason == "max_tokens"
    usage = message.usage
    assert usage.output_tokens == 20
    assert usage.input_tokens + _cached(usage) == len(PROMPT)
    assert message.model_extra is not None
    assert raw.headers["request-id"] == raw.headers["x-request-id"] == message.model_extra["headgate"]["request_id"]


def _cached(usage: Any) -> int:
    return usage.cache_read_input_tokens + usage.cache_creation_input_tokens


async def test_the_limits_are_told_in_anthropics_headers(shared_gateway: RunningGateway) -> None:
    async with client(shared_gateway) as anthropic_client:
        raw = await anthropic_client.messages.with_raw_response.create(model=MODEL, messages=HELLO, max_tokens=1)
    for kind in ("requests", "tokens"):
        limit, remaining, reset = (
            raw.headers[f"anthropic-ratelimit-{kind}-{what}"] for what in ("limit", "remaining", "reset")
        )
        assert int(limit) > int(remaining) > 0
        assert datetime.datetime.fromisoformat(reset).tzinfo is not None
    assert not any(name.startswith("x-ratelimit") for name in raw.headers)


async def test_a_stream_builds_the_same_message(shared_gateway: RunningGateway) -> None:
    async with client(shared_gateway) as anthropic_client:
        async with anthropic_client.messages.stream(
            model=MODEL, messages=HELLO, max_tokens=20, extra_body=GREEDY
        ) as stream:
            events = [event async for event in stream]
            message = await stream.get_final_message()
        whole = await anthropic_client.messages.create(model=MODEL, messages=HELLO, max_tokens=20, extra_body=GREEDY)
    [start] = [event for event in events if event.type == "message_start"]
    assert start.message.usage.input_tokens + _cached(start.message.usage) == len(PROMPT)
    assert [block.text for block in message.content] == [block.text for block in whole.content] == [greedy(20)]
    assert message.stop_reason == whole.stop_reason == "max_tokens"
    assert message.usage.output_tokens == whole.usage.output_tokens == 20
    assert message.usage.input_tokens + _cached(message.usage) == len(PROMPT)


async def test_events_have_names_and_no_done(shared_gateway: RunningGateway) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 3, "stream": True}
    async with shared_gateway.session() as session, session.post("/v1/messages?beta=true", json=body) as answer:
        raw = (await answer.read()).decode()
    assert answer.headers["request-id"]
    assert "[DONE]" not in raw
    names = [line.removeprefix("event: ") for line in raw.splitlines() if line.startswith("event: ")]
    assert names[:2] == ["message_start", "ping"]
    assert 'event: ping\ndata: {"type":"ping"}\n\n' in raw
    assert names[-2:] == ["message_delta", "message_stop"]


async def test_a_stop_sequence_is_told(shared_gateway: RunningGateway) -> None:
    text = greedy(20)
    async with client(shared_gateway) as anthropic_client:
        message = await anthropic_client.messages.create(
            model=MODEL, messages=HELLO, max_tokens=20, stop_sequences=[text[4:7]], extra_body=GREEDY
        )
    assert message.stop_reason == "stop_sequence"
    assert message.stop_sequence == text[4:7]
    assert message.content[0].type == "text"
    assert message.content[0].text == text[: text.index(text[4:7])]


async def test_the_system_prompt_is_in_the_count_and_in_the_prompt(shared_gateway: RunningGateway) -> None:
    async with client(shared_gateway) as anthropic_client:
        plain = await anthropic_client.messages.count_tokens(model=MODEL, messages=HELLO)
        counted = await anthropic_client.messages.count_tokens(model=MODEL, messages=HELLO, system="be brief")
        message = await anthropic_client.messages.create(model=MODEL, messages=HELLO, system="be brief", max_tokens=1)
    assert plain.input_tokens == len(PROMPT)
    assert counted.input_tokens == len("system: be brief") + 2 + len(PROMPT)
    assert message.usage.input_tokens + _cached(message.usage) == counted.input_tokens


async def test_max_tokens_beyond_the_context_are_a_bound_and_no_wish(shared_gateway: RunningGateway) -> None:
    long: list[MessageParam] = [{"role": "user", "content": "x" * 2000}]
    async with client(shared_gateway) as anthropic_client:
        message = await anthropic_client.messages.create(model=MODEL, messages=long, max_tokens=5000)
    assert message.stop_reason == "model_context_window_exceeded"
    total = message.usage.input_tokens + _cached(message.usage) + message.usage.output_tokens
    assert total == 2048


async def test_an_answer_that_the_operators_bound_cuts_has_not_filled_the_context(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = shared_gateway.app[MODELS]._models
    monkeypatch.setitem(models, MODEL, dataclasses.replace(models[MODEL], max_output_tokens=30))
    async with client(shared_gateway) as anthropic_client:
        message = await anthropic_client.messages.create(
            model=MODEL, messages=HELLO, max_tokens=5000, extra_body=GREEDY
        )
    assert message.usage.output_tokens == 30
    assert message.stop_reason == "max_tokens"


async def test_a_prompt_beyond_the_context_is_refused(shared_gateway: RunningGateway) -> None:
    async with client(shared_gateway) as anthropic_client:
        for num_chars in (2048, 2048 - len("<user: <\nassistant:"), 30_000):
            long: list[MessageParam] = [{"role": "user", "content": "x" * num_chars}]
            with pytest.raises(anthropic.BadRequestError) as raised:
                await anthropic_client.messages.create(model=MODEL, messages=long, max_tokens=5000)
            message = raised.value.response.json()["error"]["message"]
            numbers = re.fullmatch(r"prompt is too long: (at least )?(\d+) tokens > (\d+) maximum", message)
            assert numbers and int(numbers[2]) > int(numbers[3]) >= 2047


async def test_faults_are_told_with_the_callers_names(shared_gateway: RunningGateway) -> None:
    async with client(shared_gateway) as anthropic_client:
        with pytest.raises(anthropic.BadRequestError) as raised:
            await anthropic_client.messages.create(model=MODEL, messages=HELLO, max_tokens=5, stop_sequences=["a"] * 17)
    error: Any = raised.value.body
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["param"] == "stop_sequences"
    assert error["request_id"] == raised.value.request_id


async def test_errors_of_every_layer_have_anthropics_shape(shared_gateway: RunningGateway) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 5}
    asked: list[tuple[dict[str, Any], int, str]] = [
        ({"method": "POST", "url": "/v1/messages", "json": body, "headers": {"x-api-key": "hg_live_no"}}, 401, ""),
        ({"method": "GET", "url": "/v1/messages"}, 405, "invalid_request_error"),
        ({"method": "POST", "url": "/v1/messages/none", "json": body}, 404, "not_found_error"),
        ({"method": "POST", "url": "/v1/messages", "json": body | {"model": "none"}}, 404, "not_found_error"),
        ({"method": "POST", "url": "/v1/messages", "data": b"{"}, 415, "invalid_request_error"),
        ({"method": "POST", "url": "/v1/messages", "json": {}}, 400, "invalid_request_error"),
        (
            {"method": "POST", "url": "/v1/messages", "data": io.BytesIO(b" " * (17 << 20)), "headers": JSON},
            413,
            "request_too_large",
        ),
    ]
    async with shared_gateway.session() as session:
        for options, status, kind in asked:
            async with session.request(**options) as answer:
                told = await answer.json()
                assert answer.status == status, options
                assert told["type"] == "error"
                assert told["error"]["type"] == (kind or "authentication_error")
                assert told["error"]["message"]
                assert told["request_id"] == answer.headers["request-id"]


async def test_both_ways_to_send_a_key(shared_gateway: RunningGateway) -> None:
    body = {"model": MODEL, "messages": HELLO, "max_tokens": 1}
    async with shared_gateway.session(api_key="") as session:
        headers = {"x-api-key": shared_gateway.keys.api_key, "anthropic-version": "2023-06-01"}
        async with session.post("/v1/messages", json=body, headers=headers) as answer:
            assert answer.status == 200
        headers = {"authorization": f"Bearer {shared_gateway.keys.api_key}"}
        async with session.post("/v1/messages", json=body, headers=headers) as answer:
            assert answer.status == 200
        async with session.post("/v1/messages", json=body) as answer:
            assert answer.status == 401


async def test_ignored_fields_are_named(shared_gateway: RunningGateway) -> None:
    async with client(shared_gateway) as anthropic_client:
        raw = await anthropic_client.messages.with_raw_response.create(
            model=MODEL, messages=HELLO, max_tokens=1, extra_body={"marvel": 1}
        )
    assert raw.headers["x-headgate-ignored"] == "marvel"


async def test_a_rate_limit_is_a_429_with_a_reset(shared_gateway: RunningGateway) -> None:
    _, key = await shared_gateway.new_tenant("Slow", ["chat"], limits=Limits(requests_per_minute=1))
    async with client(shared_gateway, key) as anthropic_client:
        await anthropic_client.messages.create(model=MODEL, messages=HELLO, max_tokens=1)
        with pytest.raises(anthropic.RateLimitError) as raised:
            await anthropic_client.messages.create(model=MODEL, messages=HELLO, max_tokens=1)
    error: Any = raised.value.body
    assert error["error"]["type"] == "rate_limit_error"
    assert raised.value.response.headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert int(raised.value.response.headers["retry-after"]) > 0


async def test_a_key_without_the_scope_is_refused(shared_gateway: RunningGateway) -> None:
    _, key = await shared_gateway.new_tenant("Files", ["files:read"])
    async with client(shared_gateway, key) as anthropic_client:
        with pytest.raises(anthropic.PermissionDeniedError):
            await anthropic_client.messages.create(model=MODEL, messages=HELLO, max_tokens=1)


async def test_the_ledger_has_what_the_client_was_told(shared_gateway: RunningGateway) -> None:
    async with client(shared_gateway) as anthropic_client:
        message = await anthropic_client.messages.create(
            model=MODEL, messages=HELLO, max_tokens=4, metadata={"user_id": '{"device_id": "d", "session_id": "s"}'}
        )
    await shared_gateway.settled()
    assert message.model_extra is not None
    [row] = await shared_gateway.sql(
        "SELECT cache_read, cache_write, uncached, output FROM ledger_entry WHERE request_id = :r",
        r=message.model_extra["headgate"]["request_id"],
    )
    usage = message.usage
    assert (row.cache_read, row.cache_write) == (usage.cache_read_input_tokens, usage.cache_creation_input_tokens)
    assert (row.uncached, row.output) == (usage.input_tokens, usage.output_tokens)


async def test_an_idempotency_key_gives_the_same_message_again(shared_gateway: RunningGateway) -> None:
    headers = {"Idempotency-Key": "messages-1"}
    async with client(shared_gateway) as anthropic_client:
        first, again = [
            await anthropic_client.messages.create(model=MODEL, messages=HELLO, max_tokens=4, extra_headers=headers)
            for _ in range(2)
        ]
    assert first == again


async def test_a_page_of_batches_may_be_asked_for_as_large_as_anthropics(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than 100 was refused, and the SDK says 1 to 1,000."""
    monkeypatch.setattr("gateway.routes.message_batches.MOST_SHOWN", 2, raising=False)
    params: Any = {"model": MODEL, "max_tokens": 4, "messages": HELLO}
    async with client(shared_gateway) as anthropic_client:
        batches = anthropic_client.messages.batches
        made = [(await batches.create(requests=[{"custom_id": "a", "params": params}])).id for _ in range(3)]
        page = await batches.list(limit=1000)
        assert ([batch.id for batch in page.data], page.has_more) == (made[:0:-1], True)
        assert [batch.id async for batch in page] == made[::-1]
        with pytest.raises(anthropic.BadRequestError):
            await batches.list(limit=1001)


async def test_models_in_the_shape_of_who_asks(shared_gateway: RunningGateway) -> None:
    async with client(shared_gateway) as anthropic_client:
        [model] = [model async for model in anthropic_client.models.list(limit=1)]
        one = await anthropic_client.models.retrieve(MODEL)
        with pytest.raises(anthropic.NotFoundError) as raised:
            await anthropic_client.models.retrieve("none")
    assert one == model
    assert model.id == MODEL
    assert model.max_input_tokens == 2048
    assert raised.value.request_id
    async with shared_gateway.client() as openai_client:
        assert [model.id async for model in await openai_client.models.list()] == [MODEL]
