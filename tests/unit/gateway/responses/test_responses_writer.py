"""Events and bodies of `/v1/responses`, read by the types and the accumulator of the `openai` package."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
from byte_model import tokenizer_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from openai._types import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from accounting.values.types import Usage
from gateway.base import errors
from gateway.generation.generation import ChoicePiece
from gateway.generation.stream import Numbered
from gateway.generation.writer import Ending
from gateway.parsers.dialects import OutputSyntax
from gateway.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Text
from gateway.responses.translation import echo
from gateway.schema.responses import read
from gateway.schema.tools import NO_TOOLS
from gateway.text.choice import ChoiceText, Piece, TextRules
from gateway.text.tokenizer import ModelTokenizer
from gateway.writers.responses import ResponseWriter

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BODY = {
    "model": "m",
    "input": "hi",
    "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}],
}
ENDING = Ending(Usage(3, 1, 1, 7), 4, {"request_id": "req_1"})
TURN: list[Part] = [
    Reasoning("hm"),
    Reasoning(", so"),
    Text("I "),
    Text("add"),
    CallBegin(0, "call_1", "add"),
    CallArguments(0, '{"a"'),
    CallArguments(0, ": 1}"),
    CallBegin(1, "call_2", "add"),
    CallArguments(1, "{}"),
]


def writer(**more: Any) -> ResponseWriter:
    fields, _ = read(BODY)
    shown = echo(fields, BODY, {"temperature": 1.0, "top_p": 1.0, "store": True})
    return ResponseWriter("resp_" + "0" * 48, shown, created_at=1, **more)


def pieces(parts: Sequence[Part], finish: str) -> list[ChoicePiece]:
    each = [ChoicePiece(0, Piece(), parts=[part]) for part in parts]
    return [*each, ChoicePiece(0, Piece(), finish)]


def streamed(parts: Sequence[Part], finish: str = "stop", **more: Any) -> list[dict[str, Any]]:
    out = writer(**more)
    # A reference that is kept in an event would show later texts.
    events = [copy.deepcopy(event) for event in out.opening("root")]
    for piece in pieces(parts, finish):
        events += copy.deepcopy(out.of([Numbered(0, piece)]))
    assert out.closing(ENDING) == out.closing(ENDING)
    return [*events, *out.closing(ENDING)]


def body(parts: Sequence[Part], finish: str = "stop", **more: Any) -> dict[str, Any]:
    out = writer(**more)
    return dict(out.whole("root", [out.choice(0, pieces(parts, finish))], ENDING))


def accumulated(events: Sequence[dict[str, Any]]) -> ResponseStreamState[Any]:
    state: ResponseStreamState[Any] = ResponseStreamState(text_format=omit, input_tools=omit)
    for event in events:
        state.handle_event(EVENT.validate_python(event))
    return state


def _plain(value: Any) -> Any:
    """Returns an item without what the client's parser adds."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items() if name not in ("parsed", "parsed_arguments")}
    return [_plain(one) for one in value] if isinstance(value, list) else value


PARTS = st.lists(
    st.one_of(
        st.builds(Text, st.text(min_size=1, max_size=3)),
        st.builds(Reasoning, st.text(min_size=1, max_size=3)),
        st.integers(0, 3),
    ),
    max_size=8,
)


def turn_of(drawn: Sequence[Any]) -> list[Part]:
    """Puts a call with so many fragments of arguments in place of each number."""
    parts: list[Part] = []
    num_calls = 0
    for one in drawn:
        if isinstance(one, int):
            parts += [CallBegin(num_calls, f"call_{num_calls}", "add"), *[CallArguments(num_calls, "x")] * one]
            num_calls += 1
        else:
            parts.append(one)
    return parts


@settings(deadline=None, max_examples=60)
@given(PARTS, st.sampled_from(["stop", "length", "tool_calls"]))
def test_the_accumulated_stream_is_the_body(drawn: list[Any], finish: str) -> None:
    parts = turn_of(drawn)
    events, whole = streamed(parts, finish), body(parts, finish)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert last | {"completed_at": None} == whole | {"completed_at": None}
    state = accumulated(events)
    if finish == "length":
        assert events[-1]["type"] == "response.incomplete"
        return
    found = state._completed_response
    assert found is not None
    assert [_plain(item.to_dict()) for item in found.output] == whole["output"]
    assert found.output_text == "".join(part.text for part in parts if isinstance(part, Text))
    # Each item is what its deltas add up to.
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]


def test_the_events_of_a_turn_come_in_openais_order() -> None:
    kinds = [event["type"].removeprefix("response.") for event in streamed(TURN, "tool_calls")]
    text = ["output_item.added", "content_part.added", "output_text.delta", "output_text.delta", "output_text.done"]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds == [
        "created",
        "in_progress",
        *[kind.replace("output_text", "reasoning_text") for kind in text],
        "content_part.done",
        "output_item.done",
        *text,
        "content_part.done",
        "output_item.done",
        *[call[0], call[1], *call[1:]],
        *call,
        "completed",
    ]


def test_a_body_has_items_usage_and_every_field_of_the_openai_type() -> None:
    whole = body(TURN, "tool_calls")
    parsed = Response.model_validate(whole)
    assert [item.type for item in parsed.output] == ["reasoning", "message", "function_call", "function_call"]
    assert parsed.output_text == "I add"
    assert whole["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm, so"}]
    assert whole["output"][2] | {"id": ""} == {
        "id": "",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "add",
        "arguments": '{"a": 1}',
    }
    assert whole["usage"] == {
        "input_tokens": 5,
        "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 1},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 4},
        "total_tokens": 12,
    }
    assert len({item["id"] for item in whole["output"]}) == 4


REQUIRED = [
    "id",
    "object",
    "created_at",
    "completed_at",
    "status",
    "incomplete_details",
    "model",
    "previous_response_id",
    "instructions",
    "output",
    "error",
    "tools",
    "tool_choice",
    "truncation",
    "parallel_tool_calls",
    "text",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "top_logprobs",
    "temperature",
    "reasoning",
    "user",
    "usage",
    "max_output_tokens",
    "max_tool_calls",
    "store",
    "background",
    "service_tier",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
]
"""The fields that a response must have by the Open Responses specification."""


def test_a_body_has_every_field_that_open_responses_requires() -> None:
    given = {"presence_penalty": 0.0, "frequency_penalty": 0.0}  # the route adds the values in force
    assert set(REQUIRED) - set(body(TURN) | given) == set()


def test_what_the_bound_cut_is_incomplete() -> None:
    whole = body(TURN[:4], "length")
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in whole["output"]] == ["completed", "incomplete"]
    assert whole["completed_at"] is None


def test_a_call_of_a_namespace_names_it() -> None:
    (item,) = body([CallBegin(0, "call_1", "crm__find"), CallArguments(0, "{}")], names={"crm__find": ("crm", "find")})[
        "output"
    ]
    assert (item["name"], item["namespace"]) == ("find", "crm")


def test_an_empty_output_is_an_empty_message() -> None:
    (item,) = body([])["output"]
    assert item["content"] == [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]


def test_reasoning_is_encrypted_where_it_is_wanted() -> None:
    assert body(TURN, seal="sealed:{}".format)["output"][0]["encrypted_content"] == "sealed:hm, so"
    assert body(TURN)["output"][0]["encrypted_content"] is None


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_failure_is_one_event_that_the_client_knows(has_begun: bool) -> None:
    out = writer()
    events = out.opening("root") if has_begun else []
    events += out.failed(errors.unavailable("upstream_lost", "The worker was lost."), "req_1")
    assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
    accumulated(events)
    failed = events[-1]["response"]
    assert failed["error"] == {"code": "server_error", "message": "The worker was lost."}
    assert failed["headgate"] == {"request_id": "req_1", "code": "upstream_lost", "retryable": True}


TOKENIZER = ModelTokenizer(tokenizer_spec())
SYNTAX = OutputSyntax.of("", style="think")


@settings(deadline=None, max_examples=60)
@given(
    thought=st.text("hé\n", max_size=5),
    text=st.text("thé <\n", max_size=6).filter(str.strip),
    sizes=st.lists(st.integers(1, 12), max_size=20),
)
def test_the_logprobs_of_a_text_are_those_of_its_own_tokens(thought: str, text: str, sizes: list[int]) -> None:
    """They began with the tokens of the reasoning's end and of the lines after it."""
    tokens = list(f"<think>{thought}</think>\n\n{text}".encode())
    choice, parser = ChoiceText(TOKENIZER, TextRules()), SYNTAX.parser(NO_TOOLS, False)()
    out = writer(tokenizer=TOKENIZER)
    shown = ""
    for size in [*sizes, len(tokens)]:
        found = [choice.push(token) for token in tokens[:size]]
        tokens = tokens[size:]
        piece = Piece("".join(one.text for one in found), tuple(entry for one in found for entry in one.entries))
        parts = [*parser.push(piece.text), *([] if tokens else parser.end())]
        shown += "".join(part.text for part in parts if isinstance(part, Text))
        out.of([Numbered(0, ChoicePiece(0, piece, None if tokens else "stop", parts=parts))])
        if not tokens:
            break
    (message,) = [item for item in out.response("completed")["output"] if item["type"] == "message"]
    (content,) = message["content"]
    assert content["text"] == shown
    assert bytes(byte for one in content["logprobs"] for byte in one["bytes"]).decode() == shown
