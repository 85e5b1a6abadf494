"""Forms of the output through a real gateway: the official client, streams, usage, and every refusal's shape."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from gateways import MODEL, RunningGateway
from served import served

MESSAGES: Any = [{"role": "user", "content": "say it"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Bern", "Zürich"]},
        "people": {"type": "integer", "minimum": 1, "maximum": 2_000_000},
        "mayor": {"anyOf": [{"$ref": "#/$defs/person"}, {"type": "null"}]},
    },
    "required": ["city", "people", "mayor"],
    "additionalProperties": False,
    "$defs": {
        "person": {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
    },
}
JSON_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": SCHEMA}}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_gateway(redis_socket: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningGateway]:
    async with served(tmp_path_factory.mktemp("gateway"), redis_socket) as gateway:
        yield gateway


pytestmark = pytest.mark.asyncio(loop_scope="module")


async def chat(gateway: RunningGateway, **fields: Any) -> Any:
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "seed": 5} | fields
    async with gateway.client() as client:
        return await client.chat.completions.create(**fields)


async def test_the_official_client_gets_json_that_satisfies_its_schema(shared_gateway: RunningGateway) -> None:
    reply = await chat(shared_gateway, response_format=JSON_SCHEMA, n=3, temperature=1)
    texts = [choice.message.content for choice in reply.choices]
    assert len(set(texts)) == 3
    for text in texts:
        value = json.loads(text)
        assert value["city"] in ("Bern", "Zürich") and 1 <= value["people"] <= 2_000_000
        assert value["mayor"] is None or value["mayor"]["age"] <= 99
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}
    # One token a byte, and none for the end: nothing can follow a closing brace.
    assert reply.usage.completion_tokens == sum(len(text.encode()) for text in texts)


async def test_a_stream_carries_the_same_text_and_usage(shared_gateway: RunningGateway) -> None:
    whole = await chat(shared_gateway, response_format=JSON_SCHEMA)
    pieces, usage, finish = [], None, None
    async with shared_gateway.client() as client:
        async for chunk in await client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            max_tokens=200,
            seed=5,
            response_format=JSON_SCHEMA,
            stream=True,
            stream_options={"include_usage": True},
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                pieces.append(choice.delta.content or "")
                finish = choice.finish_reason or finish
    assert "".join(pieces) == whole.choices[0].message.content
    assert finish == "stop"
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens


async def test_other_forms_through_chat_and_completions(shared_gateway: RunningGateway) -> None:
    for outputs, expected in [
        ({"choice": ["left", "right"]}, ("left", "right")),
        ({"regex": r"[ab]{3}"}, tuple(a + b + c for a in "ab" for b in "ab" for c in "ab")),
        ({"grammar": 'root ::= "x" ("y" | "z")'}, ("xy", "xz")),
        ({"json": {"enum": [1, None]}}, ("1", "null")),
    ]:
        body = {"structured_outputs": outputs}
        reply = await chat(shared_gateway, extra_body=body)
        assert reply.choices[0].message.content in expected
        async with shared_gateway.client() as client:
            plain = await client.completions.create(model=MODEL, prompt=["one", "two"], max_tokens=20, extra_body=body)
        assert [choice.text in expected for choice in plain.choices] == [True, True]


async def test_the_parameters_of_other_servers_name_the_same_forms(shared_gateway: RunningGateway) -> None:
    one_of = {"enum": ["left", "right"]}
    for body, expected in [
        ({"regex": "[ab]"}, ("a", "b")),
        ({"ebnf": 'root ::= "x" | "y"'}, ("x", "y")),
        ({"grammar": 'root ::= "x" | "y"'}, ("x", "y")),
        ({"json_schema": one_of}, ('"left"', '"right"')),
        ({"json_schema": json.dumps(one_of)}, ('"left"', '"right"')),
        ({"response_format": {"type": "json_object", "schema": one_of}}, ('"left"', '"right"')),
        ({"response_format": {"type": "json_schema", "schema": one_of}}, ('"left"', '"right"')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "side", "schema": one_of}}},
            ('"left"', '"right"'),
        ),
        ({"response_format": {"type": "text"}, "regex": "[ab]"}, ("a", "b")),
    ]:
        reply = await chat(shared_gateway, extra_body=body)
        assert reply.choices[0].message.content in expected, body
        async with shared_gateway.client() as client:
            plain = await client.completions.create(model=MODEL, prompt="one", max_tokens=20, extra_body=body)
        assert plain.choices[0].text in expected, body


async def test_a_stop_string_cuts_a_form_and_is_named(shared_gateway: RunningGateway) -> None:
    reply = await chat(shared_gateway, response_format=JSON_SCHEMA, stop=['"people"'])
    (choice,) = reply.choices
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == '"people"'
    assert choice.message.content.startswith("{") and not choice.message.content.endswith("}")
    whole = await chat(shared_gateway, response_format=JSON_SCHEMA)
    assert whole.choices[0].message.content.startswith(choice.message.content + '"people"')
    assert whole.choices[0].stop_reason is None


async def test_with_ignore_eos_a_text_goes_on_as_long_as_its_form_does(shared_gateway: RunningGateway) -> None:
    forms = [({"json_object": True}, "stop"), ({"regex": "[ab]{3,5}"}, "stop"), ({"regex": "[ab]+"}, "length")]
    for outputs, finish in forms:
        body = {"structured_outputs": outputs, "ignore_eos": True}
        bias = {"125": 100} if "json_object" in outputs else {}
        reply = await chat(shared_gateway, max_tokens=60, extra_body=body, logit_bias=bias)
        assert reply.choices[0].finish_reason == finish, outputs
        length = len(reply.choices[0].message.content)
        assert length == (5 if "{3,5}" in str(outputs) else 60 if finish == "length" else length)


async def test_a_text_that_is_cut_ends_with_length(shared_gateway: RunningGateway) -> None:
    reply = await chat(shared_gateway, response_format=JSON_SCHEMA, max_tokens=4)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 4


async def test_a_json_object_is_one(shared_gateway: RunningGateway) -> None:
    reply = await chat(shared_gateway, response_format={"type": "json_object"}, logit_bias={"125": 50})
    assert reply.choices[0].message.content.startswith("{")


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
            "unsupported_schema",
            "response_format.json_schema.schema/not",
        ),
        ({"response_format": {"type": "json_schema"}}, "missing_required_parameter", "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "missing_required_parameter",
            "response_format.json_schema.name",
        ),
        ({"response_format": {"type": "xml"}}, "invalid_value", "response_format.type"),
        ({"response_format": JSON_SCHEMA, "extra_body": {"min_tokens": 3}}, "invalid_value", "min_tokens"),
        ({"response_format": JSON_SCHEMA, "extra_body": {"bad_words": ["x"]}}, "invalid_value", "bad_words"),
        (
            {"response_format": JSON_SCHEMA, "extra_body": {"allowed_token_ids": [120]}},
            "invalid_value",
            "allowed_token_ids",
        ),
        ({"response_format": JSON_SCHEMA, "extra_body": {"regex": "a"}}, "invalid_value", "regex"),
        ({"extra_body": {"regex": "a", "ebnf": 'root ::= "b"'}}, "invalid_value", "regex"),
        ({"extra_body": {"regex": "(?=a)"}}, "unsupported_schema", "regex"),
        (
            {"response_format": JSON_SCHEMA, "extra_body": {"structured_outputs": {"regex": "a"}}},
            "invalid_value",
            "structured_outputs",
        ),
        (
            {"extra_body": {"structured_outputs": {"regex": "a", "choice": ["b"]}}},
            "invalid_value",
            "structured_outputs",
        ),
        ({"extra_body": {"structured_outputs": {"regex": "(?=a)"}}}, "unsupported_schema", "structured_outputs.regex"),
        ({"extra_body": {"structured_outputs": {"choice": [1]}}}, "invalid_type", "structured_outputs.choice[0]"),
        (
            {"extra_body": {"structured_outputs": {"grammar": 'root ::= "a" b'}}},
            "unsupported_schema",
            "structured_outputs.grammar",
        ),
        ({"extra_body": {"guided_regex": "a"}}, "unsupported_parameter", "guided_regex"),
    ],
    ids=lambda value: str(value)[-60:],
)
async def test_what_cannot_be_enforced_is_a_400_that_says_where(
    shared_gateway: RunningGateway, fields: dict[str, Any], code: str, param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(shared_gateway, **fields)
    assert (caught.value.code, caught.value.param) == (code, param)


async def test_a_refused_grammar_costs_nothing_and_the_next_request_runs(shared_gateway: RunningGateway) -> None:
    with pytest.raises(openai.BadRequestError):
        await chat(shared_gateway, stream=True, extra_body={"structured_outputs": {"grammar": 'root ::= ""'}})
    reply = await chat(shared_gateway, extra_body={"structured_outputs": {"choice": ["ok"]}})
    assert reply.choices[0].message.content == "ok"
