"""Tools and thinking in Messages: loops of the unmodified `anthropic` client against a model that says what it is told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
import pytest_asyncio
from fakes import ScriptedRunner
from gateways import MODEL, RunningGateway
from served import served

pytestmark = pytest.mark.asyncio(loop_scope="module")

RUNNER = ScriptedRunner()
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ASKED: Any = [{"role": "user", "content": "How is it in Paris and Rome?"}]
FIELDS: dict[str, Any] = {"model": MODEL, "max_tokens": 300, "tools": [WEATHER]}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    async with served(tmp_path_factory.mktemp("gateway"), redis_socket, RUNNER) as gateway:
        yield gateway


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(gateway: RunningGateway) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=gateway.keys.api_key, max_retries=0) as client:
        yield client


@pytest.fixture
def says() -> Iterator[Any]:
    """The model gives these answers, one for each of its turns."""

    def tell(*answers: str) -> None:
        RUNNER.says = lambda prompt: answers[min(prompt.count("assistant: "), len(answers) - 1)]

    yield tell
    RUNNER.says = lambda prompt: None


async def test_a_loop_with_two_calls_at_once(client: anthropic.AsyncAnthropic, says: Any) -> None:
    says(f"Let me look.\n{PARIS}\n{ROME}", "Sun in both.")
    messages = list(ASKED)
    reply = await client.messages.create(**FIELDS, messages=messages)
    assert reply.stop_reason == "tool_use"
    text, *calls = reply.content
    assert text.type == "text"
    assert text.text.strip() == "Let me look."
    assert [call.input for call in calls if call.type == "tool_use"] == [{"city": "Paris"}, {"city": "Rome"}]
    assert all(call.type == "tool_use" and call.id.startswith("toolu_") for call in calls)
    messages.append(reply.to_param())
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls]
    messages.append({"role": "user", "content": results})
    reply = await client.messages.create(**FIELDS, messages=messages)
    assert [block.text for block in reply.content if block.type == "text"] == ["Sun in both."]
    assert reply.stop_reason == "end_turn"
    assert reply.usage.cache_read_input_tokens is not None
    assert reply.usage.cache_read_input_tokens > 0


async def test_a_tool_with_a_name_of_an_mcp_server_is_called_and_told_of(
    client: anthropic.AsyncAnthropic, says: Any
) -> None:
    name = "mcp__plugin_company-internal-tooling_weather-service__get_weather_now"
    assert len(name) == 69
    says(PARIS.replace("get_weather", name), "Sun.")
    fields = FIELDS | {"tools": [WEATHER | {"name": name}]}
    reply = await client.messages.create(**fields, messages=ASKED)
    [call] = reply.content
    assert (reply.stop_reason, call.type, call.name) == ("tool_use", "tool_use", name)
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sun"}]}
    history: Any = [*ASKED, {"role": "assistant", "content": reply.content}, result]
    again = await client.messages.create(**fields, messages=history)
    assert again.content[0].text == "Sun."


async def test_a_stream_has_the_same_calls(client: anthropic.AsyncAnthropic, says: Any) -> None:
    says(f"Let me look.\n{PARIS}\n{ROME}")
    async with client.messages.stream(**FIELDS, messages=ASKED) as stream:
        fragments = [event.partial_json async for event in stream if event.type == "input_json"]
        streamed = await stream.get_final_message()
    whole = await client.messages.create(**FIELDS, messages=ASKED)
    assert len(fragments) > 5
    assert [_without_id(block) for block in streamed.content] == [_without_id(block) for block in whole.content]
    assert streamed.stop_reason == whole.stop_reason == "tool_use"


def _without_id(block: Any) -> dict[str, Any]:
    return {name: value for name, value in block.to_dict().items() if name != "id"}


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "get_weather"}])
async def test_a_forced_call_has_valid_input(client: anthropic.AsyncAnthropic, says: Any, choice: Any) -> None:
    reply = await client.messages.create(**FIELDS, messages=ASKED, tool_choice=choice)
    calls = [block for block in reply.content if block.type == "tool_use"]
    assert calls
    assert all(call.input["city"] in ("Paris", "Rome") for call in calls)


async def test_tools_are_in_the_count(client: anthropic.AsyncAnthropic, says: Any) -> None:
    plain = await client.messages.count_tokens(model=MODEL, messages=ASKED)
    with_tools = await client.messages.count_tokens(model=MODEL, messages=ASKED, tools=[WEATHER])
    says("ok")
    reply = await client.messages.create(**FIELDS, messages=ASKED)
    usage = reply.usage
    assert with_tools.input_tokens > plain.input_tokens
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    assert usage.input_tokens + cached == with_tools.input_tokens


async def test_a_bad_schema_is_told_with_the_callers_path(client: anthropic.AsyncAnthropic) -> None:
    bad: Any = WEATHER | {"input_schema": {"type": "object", "properties": {"a": {"type": "nothing"}}}, "strict": True}
    with pytest.raises(anthropic.BadRequestError) as raised:
        await client.messages.create(
            model=MODEL, max_tokens=9, messages=ASKED, tools=[bad], tool_choice={"type": "any"}
        )
    error: Any = raised.value.body
    assert error["error"]["param"].startswith("tools[0].input_schema")


@pytest.mark.parametrize("name", ["a" * 129, "a b", "a\n"])
async def test_a_name_that_no_tool_may_have_is_told(client: anthropic.AsyncAnthropic, name: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match="1 to 128 letters, digits, '_' and '-'"):
        await client.messages.create(**FIELDS | {"tools": [WEATHER | {"name": name}]}, messages=ASKED)


async def test_a_named_tool_must_exist(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        await client.messages.create(**FIELDS, messages=ASKED, tool_choice={"type": "tool", "name": "none"})
    error: Any = raised.value.body
    assert error["error"]["param"] == "tool_choice.name"


async def test_a_schema_of_the_output_is_kept(client: anthropic.AsyncAnthropic) -> None:
    reply = await client.messages.create(
        model=MODEL, max_tokens=300, messages=ASKED, output_config={"format": {"type": "json_schema", "schema": SCHEMA}}
    )
    assert reply.content[0].type == "text"
    assert reply.content[0].text in ('{"city": "Paris"}', '{"city": "Rome"}', '{"city":"Paris"}', '{"city":"Rome"}')


async def test_a_cut_call_is_told_as_far_as_it_goes(client: anthropic.AsyncAnthropic, says: Any) -> None:
    says(PARIS)
    cut = len(PARIS.split("Par")[0]) + 1
    reply = await client.messages.create(**(FIELDS | {"max_tokens": cut}), messages=ASKED)
    assert reply.stop_reason == "max_tokens"
    assert [block.input for block in reply.content if block.type == "tool_use"] == [{}]


async def test_thinking_is_refused_by_name_where_there_is_none(client: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        await client.messages.create(**FIELDS, messages=ASKED, thinking={"type": "enabled", "budget_tokens": 1024})
    assert "'thinking'" in raised.value.message
