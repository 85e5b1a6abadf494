"""Messages bodies as chat bodies: what is carried over, what is refused, and under which name a fault is told."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.base import errors
from gateway.base.errors import ApiError
from gateway.messages import fields
from gateway.messages.names import own_name, renamed
from gateway.messages.request import Reader, Translated, prompt_of, to_chat
from gateway.schema.tools import read_tools
from gateway.writers.signatures import signature_of

HELLO = [{"role": "user", "content": "hello"}]
WEATHER = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}},
}
PLAIN = Reader()
THINKER = Reader(frozenset({"enable_thinking"}), "may")


def chat(reader: Reader = PLAIN, **body: Any) -> dict[str, Any]:
    return translated(reader, **body).body


def translated(reader: Reader = PLAIN, **body: Any) -> Translated:
    found, _ = fields.read({"model": "m", "max_tokens": 9, "messages": HELLO} | body)
    return to_chat(found, reader)


def fault(reader: Reader = PLAIN, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        chat(reader, **body)
    assert raised.value.status == 400
    return raised.value


def turns(*messages: Any, reader: Reader = PLAIN, **body: Any) -> list[dict[str, Any]]:
    return chat(reader, messages=list(messages), **body)["messages"]


def test_the_smallest_body() -> None:
    assert chat() == {"model": "m", "max_completion_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}


def test_max_tokens_is_required() -> None:
    with pytest.raises(ApiError) as raised:
        fields.read({"model": "m", "messages": HELLO})
    assert raised.value.param == "max_tokens"


def test_sampling_fields_have_chats_names() -> None:
    body = chat(temperature=0.5, top_p=0.9, top_k=4, stop_sequences=["END"], stream=True, seed=3)
    assert body["temperature"] == 0.5
    assert body["top_p"] == 0.9
    assert body["top_k"] == 4
    assert body["stop"] == ["END"]
    assert body["stream"] is True
    assert body["seed"] == 3


def test_system_blocks_are_paragraphs_of_one_message() -> None:
    blocks = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    blocks += [{"type": "text", "text": "two"}]
    assert turns(*HELLO, system=blocks)[0] == {"role": "system", "content": "one\n\ntwo"}
    assert turns(*HELLO, system="one")[0] == {"role": "system", "content": "one"}
    assert turns(*HELLO, system="")[0]["role"] == "user"


def test_turns_of_one_role_are_one_message() -> None:
    made = turns({"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]})
    assert made == [{"role": "user", "content": "a\n\nb"}]


def test_a_late_system_turn_stays_where_it_is() -> None:
    made = turns(*HELLO, {"role": "system", "content": "be brief"}, system="first")
    assert [turn["role"] for turn in made] == ["system", "user", "system"]


def test_an_assistants_turn_keeps_text_thoughts_and_calls() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"place": "Ulm", "days": 1.0}}
    content = [{"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "text", "text": "I look."}, call]
    results = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "dry"}]}]
    made = turns(
        *HELLO, {"role": "assistant", "content": content}, {"role": "user", "content": [*results, *_text("and?")]}
    )
    assert made[1:] == [
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"place": "Ulm", "days": 1.0}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "dry"},
        {"role": "user", "content": "and?"},
    ]


def _text(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}]


@pytest.mark.parametrize(
    ("result", "text"),
    [({}, ""), ({"content": "x"}, "x"), ({"content": "x", "is_error": True}, "Error: x"), ({"content": []}, "")],
)
def test_results_of_calls(result: dict[str, Any], text: str) -> None:
    block = {"type": "tool_result", "tool_use_id": "toolu_1", **result}
    assert turns({"role": "user", "content": [block]})[0]["content"] == text


def test_a_thought_that_was_left_out_comes_back_by_its_signature() -> None:
    def thought(**block: Any) -> Any:
        content = [{"type": "thinking", "thinking": "", **block}, *_text("a")]
        return turns(*HELLO, {"role": "assistant", "content": content})[1]["reasoning_content"]

    assert thought(signature=signature_of("h\u00fcm", is_shown=False)) == "h\u00fcm"
    assert thought(thinking="mine", signature=signature_of("hm", is_shown=False)) == "mine"
    for signature in (signature_of("hm", is_shown=True), "EqQBCgIYAhIM", "", None):
        assert thought(signature=signature) == ""
    content = [{"type": "thinking", "thinking": "", "signature": "hg2.%"}]
    told = fault(messages=[*HELLO, {"role": "assistant", "content": content}])
    assert told.param == "messages[1].content[0].signature"


def _thinking(thought: str, *blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [{"type": "thinking", "thinking": thought, "signature": "s"}, *blocks]}


def _kept(keep: Any, *messages: Any) -> list[str]:
    """Returns the thoughts that the model gets with an edit that keeps these."""
    edit = {"type": "clear_thinking_20251015"} | ({} if keep is None else {"keep": keep})
    made = turns(*messages, context_management={"edits": [edit]})
    return [message["reasoning_content"] for message in made if "reasoning_content" in message]


def test_thoughts_of_older_turns_are_cleared() -> None:
    """Claude Code asks for it after a pause of an hour, and all that it sent from then on was refused."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1"}, *_text("a reminder")]}
    messages = [*HELLO, _thinking("a", *_text("x")), *HELLO, _thinking("b", call), result, _thinking("c", *_text("y"))]
    messages += [*HELLO, {"role": "assistant", "content": "no thought"}, *HELLO]
    assert _kept({"type": "thinking_turns", "value": 1}, *messages) == ["b", "c"]
    assert _kept({"type": "thinking_turns", "value": 2}, *messages) == ["a", "b", "c"]
    for keep in ("all", {"type": "all"}, None):
        assert _kept(keep, *messages) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "keep", ["none", 1, {"type": "thinking_turns"}, {"type": "thinking_turns", "value": 0}, {"value": 1}, [], True]
)
def test_an_edit_that_keeps_something_else_is_refused(keep: Any) -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": keep}]
    assert fault(context_management={"edits": edits}).param == "context_management.edits[0].keep"


def test_a_last_assistants_turn_is_continued() -> None:
    body = chat(messages=[*HELLO, {"role": "assistant", "content": "The best is ("}])
    assert body["continue_final_message"] is True
    assert body["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image", "source": {}}], "messages[0].content[0]"),
        ([{"type": "document"}], "messages[0].content[0]"),
        ([{"type": "poem"}], "messages[0].content[0].type"),
        ([{"type": "text"}], "messages[0].content[0].text"),
        ([{"type": "text", "text": 1}], "messages[0].content[0].text"),
        ([{"type": "text", "text": "a", "cache_control": 1}], "messages[0].content[0].cache_control"),
        (["a"], "messages[0].content[0]"),
        ([{"type": "tool_result", "content": "a"}], "messages[0].content[0].tool_use_id"),
        (
            [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
            "messages[0].content[0].content[0]",
        ),
        ([{"type": "tool_use", "id": "a", "name": "b", "input": {}}], "messages[0].content[0].type"),
        (None, "messages[0].content"),
        (7, "messages[0].content"),
    ],
)
def test_blocks_that_a_user_may_not_send(content: Any, param: str) -> None:
    assert fault(messages=[{"role": "user", "content": content}]).param == param


def test_redacted_thinking_is_refused() -> None:
    told = fault(messages=[*HELLO, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}])
    assert told.param == "messages[1].content[0]"


def test_tools_become_functions() -> None:
    body = chat(tools=[WEATHER | {"type": "custom", "strict": True, "eager_input_streaming": True}])
    assert body["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "weather",
                "description": "The weather of a place.",
                "parameters": WEATHER["input_schema"],
                "strict": True,
            },
        }
    ]


def test_an_agent_may_have_more_tools_than_openai_takes() -> None:
    """128 were all. Anthropic has no such bound, and an agent with several MCP servers has more."""
    tools = [WEATHER | {"name": f"tool_{i}"} for i in range(1024)]
    assert len(read_tools(chat(tools=tools)["tools"], None, None).functions) == 1024
    with pytest.raises(ApiError):
        read_tools(chat(tools=[*tools, WEATHER])["tools"], None, None)


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "web_search_20250305", "name": "web_search"}, "tools[0].type"),
        ({"type": "bash_20250124", "name": "bash"}, "tools[0].type"),
        ({"name": "a"}, "tools[0].input_schema"),
        (WEATHER | {"defer_loading": True}, "tools[0].defer_loading"),
        (WEATHER | {"allowed_callers": ["code_execution_20250825"]}, "tools[0].allowed_callers"),
        ("weather", "tools[0]"),
    ],
)
def test_tools_that_are_refused(tool: Any, param: str) -> None:
    assert fault(tools=[tool]).param == param


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "weather"}, {"tool_choice": {"type": "function", "function": {"name": "weather"}}}),
        ({"type": "auto", "disable_parallel_tool_use": True}, {"tool_choice": "auto", "parallel_tool_calls": False}),
    ],
)
def test_choices_of_tools(choice: dict[str, Any], wanted: dict[str, Any]) -> None:
    body = chat(tools=[WEATHER], tool_choice=choice)
    assert {name: body[name] for name in ("tool_choice", "parallel_tool_calls") if name in body} == wanted


def test_unknown_choices_are_refused() -> None:
    assert fault(tool_choice={"type": "some"}).param == "tool_choice.type"
    assert fault(tool_choice={"type": "tool"}).param == "tool_choice.name"


@pytest.mark.parametrize(
    ("reader", "thinking", "wanted"),
    [
        (THINKER, {"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True}),
        (THINKER, {"type": "disabled"}, {"enable_thinking": False}),
        (THINKER, {"type": "adaptive", "display": "summarized"}, {"enable_thinking": True}),
        (Reader(frozenset({"thinking"})), {"type": "enabled", "budget_tokens": 2048}, {"thinking": True}),
        (Reader(), {"type": "adaptive"}, None),
        (Reader(), {"type": "disabled"}, None),
        (Reader(thinks="may"), {"type": "disabled"}, None),
        (Reader(thinks="may"), {"type": "enabled"}, None),
        (Reader(thinks="unknown"), {"type": "adaptive"}, None),
        (Reader(thinks="always"), {"type": "enabled", "budget_tokens": 2048}, None),
        (THINKER, {"type": "adaptive", "display": "omitted"}, {"enable_thinking": True}),
        (THINKER, {"type": "adaptive", "display": "updates"}, {"enable_thinking": True}),
    ],
)
def test_thinking(reader: Reader, thinking: dict[str, Any], wanted: dict[str, Any] | None) -> None:
    assert chat(reader, thinking=thinking).get("chat_template_kwargs") == wanted


@pytest.mark.parametrize(
    ("reader", "thinking", "param"),
    [
        (Reader(), {"type": "enabled", "budget_tokens": 2048}, "thinking.type"),
        (Reader(thinks="always"), {"type": "disabled"}, "thinking.type"),
        (Reader(thinks="unknown"), {"type": "disabled"}, "thinking.type"),
        (Reader(thinks="unknown"), {"type": "enabled", "budget_tokens": 2048}, "thinking.type"),
        (THINKER, {"type": "sometimes"}, "thinking.type"),
        (THINKER, {"type": "adaptive", "display": "verbose"}, "thinking.display"),
    ],
)
def test_thinking_that_a_model_cannot_do(reader: Reader, thinking: dict[str, Any], param: str) -> None:
    assert fault(reader, thinking=thinking).param == param


def test_what_anthropics_api_has_and_is_not_offered_is_told_by_its_name() -> None:
    for body, words in (({"max_tokens": 0}, "no answer"), ({"thinking": {"type": "between_tools"}}, "'between_tools'")):
        told = fault(**body)
        assert told.code == "unsupported_parameter" and words in told.message


def test_a_budget_of_thoughts_is_a_bound() -> None:
    thinking = {"type": "enabled", "budget_tokens": 2048}
    assert chat(THINKER, thinking=thinking)["thinking_token_budget"] == 2048
    assert "thinking_token_budget" not in chat(THINKER, thinking={"type": "adaptive"})


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_a_schema_of_the_output(place: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    body = chat(**{place: {"format": form} if place == "output_config" else form})
    assert body["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_effort() -> None:
    assert "reasoning_effort" not in chat(output_config={"effort": "high"})
    assert fault(output_config={"effort": "low"}).param == "output_config.effort"
    with_effort = Reader(frozenset({"reasoning_effort"}))
    assert chat(with_effort, output_config={"effort": "low"})["reasoning_effort"] == "low"
    assert fault(with_effort, output_config={"effort": "big"}).param == "output_config.effort"


@pytest.mark.parametrize("thinking", [None, {"type": "adaptive"}, {"type": "disabled"}])
def test_a_model_that_thinks_or_not_takes_every_effort(thinking: Any) -> None:
    body = chat(THINKER, output_config={"effort": "xhigh"}, thinking=thinking)
    assert body == chat(THINKER, thinking=thinking)


@pytest.mark.parametrize(
    ("user_id", "wanted"),
    [
        ("u1", {"user": "u1"}),
        ('{"device_id": "d", "account_uuid": "", "session_id": "s"}', {"user": "d", "prompt_cache_key": "s"}),
        ('{"device_id": "d", "account_uuid": "a", "session_id": "s"}', {"user": "a", "prompt_cache_key": "s"}),
        ("user_1_account__session_0a-b", {"user": "user_1_account_", "prompt_cache_key": "0a-b"}),
        ("{broken", {"user": "{broken"}),
        ('{"session_id": 1}', {"user": '{"session_id": 1}'}),
    ],
)
def test_the_end_user_and_the_conversation(user_id: str, wanted: dict[str, str]) -> None:
    body = chat(metadata={"user_id": user_id})
    assert {name: body[name] for name in ("user", "prompt_cache_key") if name in body} == wanted


@pytest.mark.parametrize(
    "body",
    [
        {"n": 2},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"container": "c"},
        {"mcp_servers": [{}]},
        {"speed": "fast"},
        {"service_tier": "flex"},
        {"inference_geo": "eu"},
        {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
        {"cache_control": {"type": "forever"}},
        {"cache_control": {"type": "ephemeral", "ttl": "2d"}},
        {"top_p": 2},
        {"stop_sequences": [""]},
        {"messages": []},
        {"messages": [1]},
        {"messages": [{"role": "robot", "content": "a"}]},
        {"max_tokens": 0},
    ],
)
def test_fields_that_are_refused_by_name(body: dict[str, Any]) -> None:
    [name] = body
    assert (fault(**body).param or "").startswith(name)


def test_fields_that_ask_for_nothing_are_taken() -> None:
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    chat(n=None, mcp_servers=[], logprobs=False, context_management={"edits": edits}, speed="standard")


def test_unknown_fields_are_named() -> None:
    _, ignored = fields.read({"model": "m", "max_tokens": 1, "messages": HELLO, "betas": ["x"], "a b": 1})
    assert ignored == ["betas"]


def test_a_count_needs_no_bound() -> None:
    found = fields.read_count({"model": "m", "messages": HELLO, "tools": [WEATHER]})
    assert set(prompt_of(found, Reader()).body) == {"model", "messages", "tools"}


@pytest.mark.parametrize(
    ("param", "own"),
    [
        ("max_completion_tokens", "max_tokens"),
        ("stop", "stop_sequences"),
        ("stop_token_ids", "stop_token_ids"),
        ("tools[3].function.parameters.properties.a", "tools[3].input_schema.properties.a"),
        ("tools[3].function.name", "tools[3].name"),
        ("tool_choice.function.name", "tool_choice.name"),
        ("response_format.json_schema.schema", "output_config.format.schema"),
        ("response_format", "output_config.format"),
        ("chat_template_kwargs.enable_thinking", "thinking"),
        ("messages[1].content", "messages[0].content"),
        ("messages[7].content", "messages"),
        ("messages", "messages"),
        ("temperature", "temperature"),
    ],
)
def test_faults_have_the_callers_names(param: str, own: str) -> None:
    assert own_name(param, ["system", "messages[0].content"]) == own


def test_the_sentence_names_the_callers_field_too() -> None:
    told = renamed(errors.invalid("'stop' cannot be combined with a form.", "stop"), [])
    assert told.message == "'stop_sequences' cannot be combined with a form."
    assert told.param == "stop_sequences"
    assert renamed(errors.model_not_found(), []).param == "model"


def test_messages_without_any_block_are_refused():
    with pytest.raises(ApiError) as caught:
        translated(messages=[{"role": "user", "content": []}])
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert chat(messages=[{"role": "user", "content": ""}])["messages"]
