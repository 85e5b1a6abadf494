"""Bodies of `/v1/responses` as bodies of chat, and chat's faults in the caller's words."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.base import errors
from gateway.responses.translation import Translated, echo, translate
from gateway.schema.responses import read


def _unseal(text: str) -> str:
    if not text.startswith("sealed:"):
        raise ValueError(text)
    return text.removeprefix("sealed:")


def _translated(history: tuple[Any, ...] = (), **body: Any) -> Translated:
    value = {"model": "m", **body}
    fields, _ = read(value)
    return translate(value, fields, fields.items, _unseal, history)


def _refused(**body: Any) -> errors.ApiError:
    with pytest.raises(errors.ApiError) as found:
        _translated(**body)
    assert found.value.status == 400
    return found.value


CALL = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": "{}", "id": "fc_1"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "3"}


@pytest.mark.parametrize("name", [["msg_1"], {"a": 1}, 7])
def test_an_id_that_is_no_text_is_refused(name: Any) -> None:
    """Whoever named an item of the same response by its id later got a 500."""
    found = _refused(input=[{"role": "user", "content": "hi", "id": name}])
    assert (found.param, found.code) == ("input[0].id", "invalid_type")
    assert _translated(input=[{"role": "user", "content": "hi", "id": None}]).body


def test_an_id_is_bounded() -> None:
    """It is in no prompt, so one of megabytes was stored and sent back."""
    found = _refused(input=[{"role": "user", "content": "hi", "id": "x" * 1025}])
    assert (found.param, found.code) == ("input[0].id", "invalid_value")
    _translated(input=[{"role": "user", "content": "hi", "id": "x" * 1024}])


def test_a_text_is_one_message_of_the_users_behind_the_instructions() -> None:
    body = _translated(input="hi", instructions="be brief", max_output_tokens=5, temperature=0, stream=True).body
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 5,
        "temperature": 0,
        "stream": True,
    }


def test_reasoning_text_and_calls_of_a_turn_are_one_message() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I add", "annotations": []}],
        },
        CALL,
        CALL | {"call_id": "call_2"},
        OUTPUT,
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "sealed:so"},
        {"role": "assistant", "content": "3"},
    ]
    made = _translated(input=items)
    assert made.body["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "1+2?"}]},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": [{"type": "text", "text": "I add"}],
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}},
                {"id": "call_2", "type": "function", "function": {"name": "add", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
        {"role": "assistant", "reasoning_content": "so", "content": "3"},
    ]
    assert made.paths == ["input[0]", "input[1]", "input[5]", "input[6]"]


def test_two_texts_of_the_assistant_stay_two_messages() -> None:
    turns = [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert _translated(input=turns).body["messages"] == turns


def test_history_stands_between_instructions_and_input() -> None:
    made = _translated((CALL, OUTPUT), instructions="be brief", input="go on", previous_response_id="resp_1")
    assert [message["role"] for message in made.body["messages"]] == ["system", "assistant", "tool", "user"]


def test_formats_lose_a_level() -> None:
    schema = {"type": "json_schema", "name": "n", "strict": True, "schema": {"type": "object"}}
    assert _translated(input="hi", text={"format": schema}).body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "n", "strict": True, "schema": {"type": "object"}},
    }
    assert _translated(input="hi", text={"format": {"type": "json_object"}}).body["response_format"] == {
        "type": "json_object"
    }
    assert "response_format" not in _translated(input="hi", text={"format": {"type": "text"}}).body
    assert _refused(input="hi", text={"format": {"type": "json_schema", "name": "n"}}).param == "text.format.schema"


def test_tools_and_choices_gain_a_level() -> None:
    tools = [{"type": "function", "name": name, "parameters": {}, "strict": None} for name in ("add", "sub")]
    body = _translated(input="hi", tools=tools, tool_choice={"type": "function", "name": "add"}).body
    assert body["tools"][0] == {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert body["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "sub"}]}
    body = _translated(input="hi", tools=tools, tool_choice=allowed).body
    assert [tool["function"]["name"] for tool in body["tools"]] == ["sub"]
    assert body["tool_choice"] == "required"


def test_functions_of_a_namespace_have_its_name_in_front_there_and_back() -> None:
    space = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": []}
    space["tools"] = [{"type": "function", "name": "find", "description": "Finds one."}]
    item = CALL | {"name": "find", "namespace": "crm"}
    made = _translated(input=[{"role": "user", "content": "x"}, item], tools=[space])
    assert made.body["tools"] == [
        {"type": "function", "function": {"name": "crm__find", "description": "Customers.\nFinds one."}}
    ]
    assert made.body["messages"][1]["tool_calls"][0]["function"]["name"] == "crm__find"
    assert made.names == {"crm__find": ("crm", "find")}
    assert made.tool_paths == ["tools[0].tools[0]"]
    assert _refused(input="x", tools=[space | {"tools": [{"type": "shell"}]}]).param == "tools[0].tools[0].type"
    assert _refused(input="x", tools=[space | {"name": 3}]).param == "tools[0].name"
    custom = _translated(input="x", tools=[space | {"tools": [{"type": "custom", "name": "note"}]}])
    assert custom.body["tools"] == [{"type": "custom", "custom": {"name": "crm__note", "description": "Customers."}}]


def test_logprobs_are_asked_for_by_include_or_number() -> None:
    assert "logprobs" not in _translated(input="hi", top_logprobs=0).body
    body = _translated(input="hi", include=["message.output_text.logprobs"]).body
    assert (body["logprobs"], body["top_logprobs"]) == (True, 0)
    assert _translated(input="hi", top_logprobs=3).body["top_logprobs"] == 3


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "input", "missing_required_parameter"),
        ({"input": []}, "input", "missing_required_parameter"),
        ({"input": 3}, "input", "invalid_type"),
        ({"input": ["hi"]}, "input[0]", "invalid_type"),
        ({"input": [{"content": "hi"}]}, "input[0].type", "missing_required_parameter"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "unsupported_parameter"),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role", "invalid_value"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
            "invalid_value",
        ),
        (
            {
                "input": [
                    CALL,
                    OUTPUT | {"output": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]},
                ]
            },
            "input[1].output[0].image_url",
            "invalid_value",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input[0].content[0]",
            "unsupported_parameter",
        ),
        ({"input": [CALL | {"call_id": 3}]}, "input[0].call_id", "invalid_type"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content", "invalid_value"),
        ({"input": "hi", "truncation": "auto"}, "truncation", "unsupported_parameter"),
        ({"input": "hi", "conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"input": "hi", "max_tokens": 3}, "max_tokens", "unsupported_parameter"),
        ({"input": "hi", "n": 2}, "n", "unsupported_parameter"),
        (
            {"input": "hi", "prompt_cache_options": {"prewarm": True}},
            "prompt_cache_options.prewarm",
            "unsupported_parameter",
        ),
        ({"input": "hi", "include": ["everything"]}, "include[0]", "invalid_value"),
        ({"input": "hi", "background": True, "store": False}, "background", "invalid_value"),
        ({"input": "hi", "tools": [{"type": "web_search"}]}, "tools[0].type", "unsupported_parameter"),
        ({"input": "hi", "tool_choice": {"type": "mcp"}}, "tool_choice.type", "unsupported_parameter"),
        ({"input": "hi", "reasoning": {"summary": "long"}}, "reasoning.summary", "invalid_value"),
        ({"input": "hi", "text": {"verbosity": "loud"}}, "text.verbosity", "invalid_value"),
        ({"input": "hi", "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ],
)
def test_what_cannot_be_honoured_is_named(body: dict[str, Any], param: str, code: str) -> None:
    fault = _refused(**body)
    assert (fault.param, fault.code) == (param, code)


def test_what_is_switched_off_is_not_refused() -> None:
    off = {"conversation": None, "n": 1, "moderation": False, "context_management": [], "prompt": {}}
    off |= {"prompt_cache_options": {"prewarm": False, "ttl": "30m"}}
    assert set(_translated(input="hi", **off).body) == {"model", "messages"}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("messages", "input"),
        ("messages[1].content[2]", "input[4].content[2]"),
        ("messages[0].content", "instructions"),
        ("messages[2].content", "previous_response_id"),
        ("tools[1].function.parameters", "tools[4].tools[1].parameters"),
        ("tools[1].custom.format.grammar.syntax", "tools[4].tools[1].format.syntax"),
        ("tools[0]", "tools[0]"),
        ("response_format.json_schema.name", "text.format.name"),
        ("response_format.type", "text.format.type"),
        ("max_tokens", "max_output_tokens"),
        ("reasoning_effort", "reasoning.effort"),
        ("temperature", "temperature"),
    ],
)
def test_a_fault_of_chats_has_the_callers_names(theirs: str, ours: str) -> None:
    translated = Translated(
        {}, ["instructions", "input[4]", "previous_response_id[7]"], ["tools[0]", "tools[4].tools[1]"]
    )
    fault = translated.told(errors.invalid(f"Missing required parameter: '{theirs}'.", theirs))
    assert fault.param == ours
    assert fault.message == f"Missing required parameter: '{ours}'."


def test_the_echo_has_every_field_of_a_response() -> None:
    value = {"model": "m", "input": "hi", "tools": [{"type": "function", "name": "add"}], "metadata": {"a": "b"}}
    shown = echo(read(value)[0], value, {"temperature": 1.0, "top_p": 1.0})
    assert shown["tools"] == [
        {"type": "function", "name": "add", "description": None, "parameters": None, "strict": None}
    ]
    assert shown["metadata"] == {"a": "b"}
    assert shown["text"]["format"] == {"type": "text"}
    assert shown["temperature"] == 1.0


def test_an_output_without_its_call_is_refused_where_it_stands() -> None:
    assert _refused(input=[{"role": "user", "content": "hi"}, OUTPUT]).param == "input[1].call_id"
    assert _refused(input=[OUTPUT, CALL]).param == "input[0].call_id"
