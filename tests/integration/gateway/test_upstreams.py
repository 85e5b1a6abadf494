"""Servers of others that answer for models: chat, completions, embeddings, Responses and Messages over them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from gateways import MODEL, RunningGateway, running_gateway
from provider import KEY, TEXT, Provider, Script, declared, price, running_provider
from redis_db import emptied

MESSAGES = [{"role": "user", "content": "Say something."}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture
async def provider() -> AsyncIterator[Provider]:
    async with running_provider() as found:
        yield found


@pytest.fixture
async def bought(
    tmp_path: Path, redis_url: str, provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[RunningGateway]:
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    async with running_gateway(tmp_path / "home", redis_url, upstreams={"mock": declared(provider)}) as gateway:
        await price(gateway, "bought", "vectors")
        yield gateway


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_bought(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    """With a provider of its own, for tests that look at the answer alone."""
    home = tmp_path_factory.mktemp("bought")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROVIDER_KEY", KEY)
        async with (
            running_provider() as provider,
            running_gateway(home, emptied(redis_socket, 3), upstreams={"mock": declared(provider)}) as gateway,
        ):
            await price(gateway, "bought")
            yield gateway


@pytest.fixture
async def client(bought: RunningGateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with bought.client() as found:
        yield found


async def test_chat_is_answered_by_an_upstream_and_paid_by_its_usage(
    bought: RunningGateway, client: openai.AsyncOpenAI, provider: Provider
) -> None:
    answer = await client.chat.completions.create(model="bought", messages=MESSAGES)
    assert answer.choices[0].message.content == TEXT
    assert provider.asked[0]["model"] == "theirs"
    assert provider.heads[0]["Authorization"] == f"Bearer {KEY}"
    assert answer.usage.completion_tokens == 12
    await bought.balanced()
    [row] = await bought.sql("SELECT uncached, output, charge FROM ledger_entry WHERE kind = 'settle'")
    assert (row.uncached, row.output) == (answer.usage.prompt_tokens, 12)
    assert row.charge > 0


async def test_each_attempt_names_the_trace_of_its_request_and_never_the_clients(
    client: openai.AsyncOpenAI, provider: Provider
) -> None:
    provider.scripts = [Script(status=500)]
    theirs = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    raw = await client.chat.completions.with_raw_response.create(
        model="bought", messages=MESSAGES, extra_headers={"traceparent": theirs, "baggage": "a=b"}
    )
    _, trace, server_span, _ = raw.headers["traceresponse"].split("-")
    first, second = [head["traceparent"] for head in provider.heads]
    assert first == second
    _, sent_trace, sent_span, _ = first.split("-")
    assert sent_trace == trace != theirs.split("-")[1]
    assert sent_span != server_span
    assert not any("baggage" in head for head in provider.heads)


async def test_a_stream_passes_text_reasoning_and_calls_on(
    bought: RunningGateway, client: openai.AsyncOpenAI, provider: Provider
) -> None:
    provider.scripts = [Script(reasoning="Let me think. ", calls=[("look", '{"x": 1}'), ("look", '{"y": "é"}')])]
    stream = await client.chat.completions.create(
        model="bought", messages=MESSAGES, tools=TOOLS, stream=True, stream_options={"include_usage": True}
    )
    text, thought, calls, finish, usage = "", "", {}, None, None
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            thought += getattr(choice.delta, "reasoning_content", None) or ""
            finish = choice.finish_reason or finish
            for call in choice.delta.tool_calls or ():
                found = calls.setdefault(call.index, ["", ""])
                found[0] += call.function.name or ""
                found[1] += call.function.arguments or ""
        usage = chunk.usage or usage
    assert (text, thought, finish) == (TEXT, "Let me think. ", "tool_calls")
    assert calls == {0: ["look", '{"x": 1}'], 1: ["look", '{"y": "é"}']}
    assert usage is not None
    assert usage.completion_tokens > 12
    assert provider.asked[0]["tools"] == TOOLS
    await bought.balanced()


async def test_completions_of_two_prompts_are_two_requests(
    bought: RunningGateway, client: openai.AsyncOpenAI, provider: Provider
) -> None:
    answer = await client.completions.create(model="bought", prompt=["Once", "Twice"], max_tokens=5)
    assert [choice.text for choice in answer.choices] == [TEXT[:20], TEXT[:20]]
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert [body["prompt"] for body in provider.asked] == ["Once", "Twice"]
    await bought.balanced()


async def test_completions_of_too_many_choices_are_bought_from_nobody(
    bought: RunningGateway, client: openai.AsyncOpenAI, provider: Provider
) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        await client.completions.create(model="bought", prompt=["Once"] * 65, n=2, max_tokens=5)
    assert raised.value.param == "prompt"
    assert provider.asked == []


async def test_embeddings_are_vectors_of_the_provider(
    bought: RunningGateway, client: openai.AsyncOpenAI, provider: Provider
) -> None:
    answer = await client.embeddings.create(model="vectors", input=["a", "bcd"], encoding_format="float")
    assert [one.embedding for one in answer.data] == [[1.0, 0.5, -1.0], [3.0, 0.5, -1.0]]
    assert answer.usage.prompt_tokens == 1
    await bought.balanced()


async def test_several_choices_come_from_one_call(
    bought: RunningGateway, client: openai.AsyncOpenAI, provider: Provider
) -> None:
    answer = await client.chat.completions.create(model="bought", messages=MESSAGES, n=3)
    assert [choice.message.content for choice in answer.choices] == [TEXT] * 3
    assert (len(provider.asked), provider.asked[0]["n"]) == (1, 3)
    await bought.balanced()


async def test_responses_and_messages_go_over_an_upstream(
    bought: RunningGateway, client: openai.AsyncOpenAI, provider: Provider
) -> None:
    answer = await client.responses.create(model="bought", input="Say something.")
    assert answer.output_text == TEXT
    async with bought.session() as session:
        body = {"model": "bought", "messages": MESSAGES, "max_tokens": 50}
        async with session.post("/v1/messages", json=body) as found:
            message = await found.json()
    assert found.status == 200, message
    assert message["content"] == [{"type": "text", "text": TEXT}]
    assert message["usage"]["output_tokens"] == 12
    await bought.balanced()


async def test_a_field_that_no_upstream_is_asked_for_is_refused_with_its_name(bought: RunningGateway) -> None:
    for name, value in {"logprobs": True, "min_tokens": 3, "use_beam_search": True, "ignore_eos": True}.items():
        async with bought.session() as session:
            body = {"model": "bought", "messages": MESSAGES, name: value} | ({"n": 2} if "beam" in name else {})
            async with session.post("/v1/chat/completions", json=body) as found:
                error = (await found.json())["error"]
        assert (found.status, error["param"]) == (400, name), error


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("path", "name", "value", "status"),
    [
        ("chat/completions", "enable_thinking", False, 400),
        ("chat/completions", "thinking_token_budget", 0, 400),
        ("chat/completions", "reasoning_budget", 0, 400),
        ("chat/completions", "skip_special_tokens", False, 400),
        ("completions", "logprobs", 0, 400),
        ("completions", "prompt_logprobs", 0, 400),
        ("chat/completions", "logprobs", False, 200),
        ("chat/completions", "continue_final_message", False, 200),
        ("chat/completions", "ignore_eos", False, 200),
        ("completions", "min_tokens", 0, 200),
        ("completions", "echo", False, 200),
    ],
)
async def test_a_false_or_zero_that_asks_for_something_is_not_dropped(
    shared_bought: RunningGateway, path: str, name: str, value: object, status: int
) -> None:
    asked: dict[str, object] = {"prompt": "Once"} if path == "completions" else {"messages": MESSAGES}
    asked |= {"model": "bought", name: value}
    async with shared_bought.session() as session, session.post(f"/v1/{path}", json=asked) as found:
        body = await found.json()
    assert (found.status, body.get("error", {}).get("param")) == (status, name if status == 400 else None), body


async def test_thinking_that_no_upstream_is_told_of_is_refused_in_the_callers_words(
    bought: RunningGateway, provider: Provider
) -> None:
    async with bought.session() as session:
        for kind, status in {"disabled": 400, "enabled": 400, "adaptive": 200}.items():
            body = {"model": "bought", "messages": MESSAGES, "max_tokens": 50, "thinking": {"type": kind}}
            async with session.post("/v1/messages", json=body) as found:
                answer = await found.json()
            assert found.status == status, answer
            if status == 400:
                assert answer["error"]["param"] == "thinking.type"
                assert "provider" in answer["error"]["message"]
    assert len(provider.asked) == 1


async def test_an_answer_that_an_upstreams_bound_cuts_has_not_filled_the_context(
    bought: RunningGateway, provider: Provider
) -> None:
    provider.scripts = [Script(finish="length")]
    async with bought.session() as session:
        body = {"model": "bought", "messages": MESSAGES, "max_tokens": 5000}
        async with session.post("/v1/messages", json=body) as found:
            message = await found.json()
    assert (found.status, message["stop_reason"]) == (200, "max_tokens"), message


async def test_nothing_counts_the_tokens_of_a_foreign_model(bought: RunningGateway) -> None:
    async with bought.session() as session:
        for body in ({"model": "bought", "prompt": "x"}, {"model": "bought", "messages": MESSAGES}):
            async with session.post("/tokenize", json=body) as found:
                assert found.status == 400
                assert "provider" in (await found.json())["error"]["message"]


async def test_models_say_how_they_are_served_and_no_address(bought: RunningGateway, provider: Provider) -> None:
    async with bought.session() as session, session.get("/v1/models") as found:
        text = await found.text()
    served = {one["id"]: one for one in json.loads(text)["data"]}
    assert served["bought"]["served_by"] == "upstream"
    assert served["bought"]["capabilities"] == ["chat", "completions"]
    assert served["vectors"]["capabilities"] == ["embed"]
    assert served[MODEL]["served_by"] == "workers"
    assert provider.url.rpartition(":")[2] not in text
    assert "mock" not in text
