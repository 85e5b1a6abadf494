"""A message and the events that build it, with the client's own accumulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st

from accounting.values.types import Usage
from gateway.base import errors
from gateway.generation.generation import ChoicePiece
from gateway.generation.stream import Numbered
from gateway.generation.writer import Ending
from gateway.parsers.parts import CallArguments, CallBegin, Part, Reasoning, Text
from gateway.text.choice import Piece
from gateway.writers.messages import MessageWriter
from gateway.writers.signatures import signature_of, thought_in

ENDING = Ending(Usage(5, 3, 2, 7), 2, {"request_id": "req_1"})


def pieces_of(parts: Sequence[Part], finish: str = "stop", stop_reason: str | None = None) -> list[ChoicePiece]:
    pieces = [ChoicePiece(0, Piece(""), parts=[part]) for part in parts]
    return [*pieces, ChoicePiece(0, Piece(""), finish, stop_reason)]


def stream(writer: MessageWriter, pieces: Sequence[ChoicePiece]) -> list[Any]:
    writer.prompt = Usage(5, 3, 2, 0)
    events = writer.opening("root")
    for piece in pieces:
        events += writer.of([Numbered(0, piece)])
    return events + writer.closing(ENDING)


def body(writer: MessageWriter, pieces: Sequence[ChoicePiece]) -> dict[str, Any]:
    return writer.whole("root", [writer.choice(0, pieces)], ENDING)


def accumulated(events: Sequence[Any]) -> dict[str, Any]:
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    return snapshot.to_dict()


def test_text() -> None:
    events = stream(MessageWriter("m", "interactive"), pieces_of([Text("Hel"), Text("lo")]))
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    start = events[0]["message"]
    assert start["usage"]["cache_read_input_tokens"] == 5
    assert start["stop_reason"] is None
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 7
    assert events[-1]["headgate"] == {"request_id": "req_1"}


def test_the_three_counts_of_the_prompt_are_disjoint() -> None:
    usage = body(MessageWriter("m", "batch"), pieces_of([Text("a")]))["usage"]
    assert usage["input_tokens"] == 2
    assert usage["cache_creation_input_tokens"] == usage["cache_creation"]["ephemeral_5m_input_tokens"] == 3
    assert usage["cache_read_input_tokens"] == 5
    assert usage["output_tokens"] == 7
    assert usage["output_tokens_details"] == {"thinking_tokens": 2}
    assert usage["service_tier"] == "batch"


def test_a_thought_is_signed_at_its_end() -> None:
    events = stream(MessageWriter("m", "interactive"), pieces_of([Reasoning("h"), Reasoning("m"), Text("a")]))
    assert [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"] == [
        "thinking_delta",
        "thinking_delta",
        "signature_delta",
        "text_delta",
    ]
    content = body(MessageWriter("m", "interactive"), pieces_of([Reasoning("hm"), Text("a")]))["content"]
    assert content[0]["thinking"] == "hm"
    assert content[0]["signature"] == events[5]["delta"]["signature"]


def test_a_thought_that_is_left_out_is_in_its_signature_alone() -> None:
    pieces = pieces_of([Reasoning("h\u00fcm"), Reasoning("m"), Text("a")])
    events = stream(MessageWriter("m", "interactive", shows_thoughts=False), pieces)
    assert [event["type"] for event in events[2:7]] == [
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
    ]
    assert events[2]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert events[3]["delta"]["type"] == "signature_delta"
    assert thought_in(events[3]["delta"]["signature"]) == "h\u00fcmm"
    content = body(MessageWriter("m", "interactive", shows_thoughts=False), pieces)["content"]
    assert content[0] == {"type": "thinking", "thinking": "", "signature": events[3]["delta"]["signature"]}
    assert content[1]["text"] == "a"


def test_a_signature_of_others_carries_no_thought() -> None:
    for signature in ("", "EqQBCgIYAhIM", signature_of("hm", is_shown=True)):
        assert thought_in(signature) == ""
    for signature in ("hg2.%", "hg2.aG", "hg2./w=="):
        with pytest.raises(ValueError, match=r"base64|padding|utf-8"):
            thought_in(signature)


def test_calls_have_blocks_of_their_own() -> None:
    parts = [
        Text("I look."),
        CallBegin(0, "call_0a", "f"),
        CallArguments(0, '{"x": '),
        CallArguments(0, "1}"),
        CallBegin(1, "call_0b", "g"),
        CallArguments(1, "{}"),
    ]
    message = body(MessageWriter("m", "interactive"), pieces_of(parts, "tool_calls"))
    assert message["content"] == [
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "id": "toolu_0a", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "toolu_0b", "name": "g", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("finish", "stop_reason", "fills_context", "told"),
    [
        ("stop", None, False, ("end_turn", None)),
        ("stop", "END", False, ("stop_sequence", "END")),
        ("length", None, False, ("max_tokens", None)),
        ("length", None, True, ("model_context_window_exceeded", None)),
        ("tool_calls", None, False, ("tool_use", None)),
    ],
)
def test_why_it_stopped(finish: str, stop_reason: str | None, fills_context: bool, told: tuple[str, Any]) -> None:
    writer = MessageWriter("m", "interactive", fills_context=fills_context)
    message = body(writer, pieces_of([Text("a")], finish, stop_reason))
    assert (message["stop_reason"], message["stop_sequence"]) == told


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_that_a_budget_ends_has_not_filled_the_context(is_stream: bool) -> None:
    writer = MessageWriter("m", "interactive", fills_context=True)
    pieces, ending = pieces_of([Text("a")], "length"), msgspec.structs.replace(ENDING, headgate={"stop": "budget"})
    choice = writer.choice(0, pieces)
    told = writer.closing(ending)[0]["delta"] if is_stream else writer.whole("root", [choice], ending)
    assert told["stop_reason"] == "max_tokens"


PARTS = st.lists(
    st.builds(Text, st.text(max_size=4))
    | st.builds(Reasoning, st.text(max_size=4))
    | st.sampled_from(['{"a": 1}', '{"a": [1, "b', "{", '{"q": "\\u12']),
    max_size=6,
)


@given(PARTS, st.sampled_from(["stop", "length", "tool_calls"]), st.booleans())
def test_what_the_client_accumulates_is_the_body(found: list[Any], finish: str, shows_thoughts: bool) -> None:
    parts: list[Part] = []
    for number, part in enumerate(found):
        if isinstance(part, str):
            parts += [CallBegin(number, f"call_{number}", "f"), CallArguments(number, part[:3])]
            parts += [CallArguments(number, part[3:])] if part[3:] else []
        else:
            parts.append(part)
    events = stream(MessageWriter("m", "interactive", shows_thoughts=shows_thoughts), pieces_of(parts, finish))
    events = [msgspec.json.decode(msgspec.json.encode(event)) for event in events]
    whole = body(MessageWriter("m", "interactive", shows_thoughts=shows_thoughts), pieces_of(parts, finish))
    whole |= {"id": events[0]["message"]["id"], "headgate": None}
    built = accumulated(events) | {"headgate": None}
    built.pop("stop_details", None)
    assert built == whole
    Message.model_validate(whole)


def test_the_ending_may_be_asked_for_twice() -> None:
    writer = MessageWriter("m", "interactive")
    pieces = pieces_of([Text("a"), Reasoning("b")])
    choices = [writer.choice(0, pieces)]
    assert writer.whole("root", choices, ENDING) == writer.whole("root", choices, ENDING)
    streamed = MessageWriter("m", "interactive")
    stream(streamed, pieces)
    assert streamed.closing(ENDING) == streamed.closing(ENDING)


def test_a_failure_is_an_event_of_its_own() -> None:
    [event] = MessageWriter("m", "interactive").failed(errors.overloaded(1), "req_1")
    assert event["type"] == "error"
    assert event["error"]["type"] == "overloaded_error"
