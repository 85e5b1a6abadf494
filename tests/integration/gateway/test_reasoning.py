"""Reasoning through a real gateway: apart from the text, counted by the token, switched and bounded by the request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from fakes import ScriptedRunner
from gateways import MODEL, RunningGateway
from served import served

from gateway.generation.choices import Choice

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: "
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
USER: Any = {"role": "user", "content": "Why?"}
THOUGHT = "<think>\nBecause of ü.\n</think>\n\nSo."
RUNNER = ScriptedRunner()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_gateway(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    async with served(tmp_path_factory.mktemp("gateway"), redis_socket, RUNNER, template=TEMPLATE) as gateway:
        yield gateway


@pytest.fixture(autouse=True)
def thinking() -> Iterator[None]:
    RUNNER.says = lambda prompt: "Just so." if prompt.endswith("</think>") else THOUGHT
    yield
    RUNNER.says = lambda prompt: None


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def chat(gateway: RunningGateway, messages: Any = (USER,), max_tokens: int = 200, **fields: Any) -> Any:
    async with gateway.client() as client:
        return await client.chat.completions.create(
            model=MODEL, messages=list(messages), max_tokens=max_tokens, extra_body=fields
        )


async def test_reasoning_stands_apart_and_is_counted(shared_gateway: RunningGateway) -> None:
    reply = await chat(shared_gateway)
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("So.", "Because of ü.", "Because of ü.")
    thought = THOUGHT.partition("\n\n")[0]
    assert reply.usage.completion_tokens_details.reasoning_tokens == len(thought.encode())
    assert reply.usage.completion_tokens == len(THOUGHT.encode()) + 1  # the end token


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (THOUGHT, "So."),
        ("<think>\n\n</think>\n\nüber", "über"),
        ("<think>Hm.</think><b>", "<b>"),
        ("Just so.", "Just so."),
    ],
)
async def test_a_responses_logprobs_are_those_of_its_text(shared_gateway: RunningGateway, said: str, text: str) -> None:
    """They began with the tokens of the reasoning's end and of the lines after it."""
    RUNNER.says = lambda prompt: said
    asked: dict[str, Any] = {"model": MODEL, "input": "Why?", "store": False}
    async with shared_gateway.client() as client:
        made = await client.responses.create(**asked, include=["message.output_text.logprobs"])
        stream = await client.responses.create(**asked, include=["message.output_text.logprobs"], stream=True)
        deltas = [event async for event in stream if event.type == "response.output_text.delta"]
    (content,) = made.to_dict()["output"][-1]["content"]
    assert made.output_text == text
    assert bytes(byte for one in content["logprobs"] for byte in one["bytes"]) == text.encode()
    streamed = [one.to_dict() for delta in deltas for one in delta.logprobs]
    assert "".join(delta.delta for delta in deltas) == text
    assert len(streamed) == len(text.encode())


async def test_a_stream_has_the_reasoning_first(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.client() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[USER], max_tokens=200, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks if chunk.choices]
    kinds = [
        "reasoning" if "reasoning" in one else "content" for one in deltas if one.get("content") or "reasoning" in one
    ]
    assert kinds == sorted(kinds, reverse=True)
    assert "".join(one.get("reasoning_content", "") for one in deltas) == "Because of ü."
    assert "".join(one.get("content", "") for one in deltas) == "So."
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == len(THOUGHT.partition("\n\n")[0].encode())


async def test_reasoning_is_hidden_on_request_and_charged_all_the_same(shared_gateway: RunningGateway) -> None:
    reply = await chat(shared_gateway, include_reasoning=False)
    extra = reply.choices[0].message.model_extra
    assert "reasoning" not in extra and "reasoning_content" not in extra
    assert reply.choices[0].message.content == "So."
    assert reply.usage.completion_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize(
    "off",
    [{"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}],
)
async def test_reasoning_is_switched_off(shared_gateway: RunningGateway, off: dict[str, Any]) -> None:
    reply = await chat(shared_gateway, **off)
    assert reply.choices[0].message.content == "Just so."
    assert reply.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize("more", [{}, {"reasoning": {"effort": "high"}}, {"enable_thinking": True}])
async def test_a_summary_is_written_without_reasoning(shared_gateway: RunningGateway, more: dict[str, Any]) -> None:
    """The reasoning could take all tokens that a summary may have."""
    async with shared_gateway.client() as client:
        made = await client.responses.compact(model=MODEL, input="Why?", extra_body=more)
    assert made.usage.output_tokens_details.reasoning_tokens == 0
    assert made.usage.output_tokens == len("Just so.") + 1


async def test_tokenize_and_quotes_take_the_same_fields(shared_gateway: RunningGateway) -> None:
    body: dict[str, Any] = {"model": MODEL, "messages": [USER]}
    counts = []
    async with shared_gateway.session() as session:
        for more in ({}, {"enable_thinking": False}):
            async with session.post("/tokenize", json=body | more) as answer:
                counts.append((await answer.json())["count"])
            asked = {"endpoint": "/v1/chat/completions", "body": body | more | {"max_tokens": 5}}
            async with session.post("/v1/quotes", json=asked) as answer:
                assert (await answer.json())["num_prompt_tokens"] == counts[-1]
    assert counts[1] - counts[0] == len("<think></think>")


async def test_a_cut_answer_is_all_reasoning(shared_gateway: RunningGateway) -> None:
    reply = await chat(shared_gateway, max_tokens=12)
    message = reply.choices[0].message
    assert (message.content, message.reasoning_content) == ("", "Beca")
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens_details.reasoning_tokens == 12


async def test_an_answer_with_a_form_may_think_first(shared_gateway: RunningGateway) -> None:
    RUNNER.says = lambda prompt: '<think>Hm.</think>\n\n{"x": true}'
    schema = {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]}
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": schema}}
    reply = await chat(shared_gateway, response_format=form)
    message = reply.choices[0].message
    assert (message.content, message.reasoning) == ('{"x": true}', "Hm.")


async def test_a_choice_of_texts_may_think_first(shared_gateway: RunningGateway) -> None:
    RUNNER.says = lambda prompt: "<think>Hm.</think>\n\nyellow"
    reply = await chat(shared_gateway, structured_outputs={"choice": ["yes", "no"]})
    message = reply.choices[0].message
    assert (message.content, message.reasoning) == ("yes", "Hm.")


async def test_a_budget_needs_an_end_of_one_token(shared_gateway: RunningGateway) -> None:
    async with shared_gateway.session() as session:
        body = {"model": MODEL, "messages": [USER], "reasoning_budget": 5}
        async with session.post("/v1/chat/completions", json=body) as answer:
            error = (await answer.json())["error"]
    assert (answer.status, error["param"], error["code"]) == (400, "reasoning_budget", "unsupported_parameter")


def heard_prompts() -> list[str]:
    """The prompts that the model reads from now on, each of which it answers with the same word."""
    seen: list[str] = []

    def says(prompt: str) -> str:
        seen.append(prompt)
        return "Ok."

    RUNNER.says = says
    return seen


async def test_earlier_reasoning_goes_to_the_template(shared_gateway: RunningGateway) -> None:
    seen = heard_prompts()
    turns = [USER, {"role": "assistant", "content": "So.", "reasoning_content": "hm"}, USER]
    await chat(shared_gateway, turns)
    assert "assistant: <think>hm</think>So." in seen[0]


OMITTED: Any = {
    "model": MODEL,
    "max_tokens": 200,
    "messages": [USER],
    "thinking": {"type": "adaptive", "display": "omitted"},
}
"""A request of Claude Code's, in which thoughts are to be left out."""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_thought_that_was_left_out_goes_to_the_template_all_the_same(
    shared_gateway: RunningGateway, stream: bool
) -> None:
    """A request of Claude Code's with `display: omitted` was refused."""
    async with anthropic.AsyncAnthropic(base_url=shared_gateway.url, api_key=shared_gateway.keys.api_key) as client:
        if stream:
            async with client.messages.stream(**OMITTED) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**OMITTED)
        thought, text = message.content
        assert (thought.type, text.type) == ("thinking", "text")
        assert (thought.thinking, text.text) == ("", "So.")
        assert message.usage.output_tokens_details.thinking_tokens == len(THOUGHT.partition("\n\n")[0].encode())
        seen = heard_prompts()
        await client.messages.create(
            **OMITTED | {"messages": [USER, {"role": "assistant", "content": message.content}, USER]}
        )
    assert "assistant: <think>Because of ü.</think>So." in seen[0]


@pytest.mark.parametrize(
    ("path", "body", "ping"),
    [
        ("/v1/messages", OMITTED, b'event: ping\ndata: {"type":"ping"}'),
        ("/v1/chat/completions", {"model": MODEL, "messages": [USER], "include_reasoning": False}, b": ping"),
    ],
)
async def test_thoughts_that_are_not_shown_are_no_silence(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, ping: bytes
) -> None:
    """A client or a proxy gave up on a stream in which nothing came while the model thought."""
    monkeypatch.setattr("gateway.http.sse.QUIET_S", 0.0, raising=False)
    monkeypatch.setattr(RUNNER, "step_s", 0.02)
    async with shared_gateway.session() as session, session.post(path, json=body | {"stream": True}) as answer:
        seen = (await answer.read()).split(b"\n\n")
    assert seen.count(ping) > 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fault_of_a_parser_ends_its_own_request_with_an_error_and_free(
    shared_gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """The connection was cut in the middle of the stream, without a word and without a line in the log that names it."""
    RUNNER.says = lambda prompt: "It breaks here, alas." if "Break" in prompt else THOUGHT
    read = Choice.read

    def broken(self: Choice, text: str, form: Any) -> Any:
        if "b" in text:
            raise KeyError("a fault of the parser")
        return read(self, text, form)

    monkeypatch.setattr(Choice, "read", broken)
    other = asyncio.create_task(chat(shared_gateway))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Break"}], "max_tokens": 50, "stream": stream}
    body |= {"enable_thinking": False}
    async with shared_gateway.session() as session, session.post("/v1/chat/completions", json=body) as answer:
        # On a busy machine the fault may come before the first piece of a stream was sent.
        assert answer.status in ((200, 500) if stream else (500,))
        seen, request_id = await answer.text(), answer.headers["x-request-id"]
    assert '"code":"internal_error"' in seen
    assert "[DONE]" not in seen
    assert (await other).choices[0].message.content == "So."
    assert "output_not_read" in {record.message for record in caplog.records}
    await shared_gateway.settled()
    rows = await shared_gateway.sql("SELECT request_id, kind, outcome, charge FROM ledger_entry WHERE kind = 'void'")
    assert (request_id, "void", "internal", 0) in [(row.request_id, row.kind, row.outcome, row.charge) for row in rows]
    await shared_gateway.balanced()


async def test_every_answer_is_charged_once(shared_gateway: RunningGateway) -> None:
    await shared_gateway.balanced()
