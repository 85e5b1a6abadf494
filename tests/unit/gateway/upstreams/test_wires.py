"""What upstreams send: bytes of strangers become chunks or `Garbage`, and nothing else."""

from __future__ import annotations

import json
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.values.types import Usage
from gateway.base.errors import ApiError
from gateway.upstreams.outcomes import of_status
from gateway.upstreams.wires import anthropic, kinds
from gateway.upstreams.wires import events as wire_events
from gateway.upstreams.wires.events import MAX_LINE_BYTES, events
from gateway.upstreams.wires.openai import _micro_units, _vector, stated_of
from gateway.upstreams.wires.values import Ask, Garbage, Interval
from gateway.upstreams.wires.wire import Failure, id_of

ASK = Ask("chat", {"messages": [{"role": "user", "content": "hi"}]}, 2, 10, Interval(0, 1, 100))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "delta",
                    "index",
                    "content",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "usage",
                    "type",
                    "finish_reason",
                    "prompt_tokens",
                    "message",
                    "content_block",
                    "error",
                    "id",
                    "stop_reason",
                    "output_tokens",
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=20,
)


async def found(*pieces: bytes) -> list[bytes]:
    left = list(pieces)

    async def read() -> bytes:
        return left.pop(0) if left else b""

    return [event async for event in events(read)]


async def test_events_are_the_same_however_they_are_cut():
    whole = b': note\r\nevent: x\r\ndata: {"a":\r\ndata: 1}\r\n\r\ndata: [DONE]\n\n'
    expected = [b'{"a":\n1}', b"[DONE]"]
    for cut in range(len(whole)):
        assert await found(whole[:cut] or b"\n", whole[cut:]) == expected


async def test_a_line_without_end_and_a_line_of_no_stream_are_garbage():
    with pytest.raises(Garbage):
        await found(b"data: " + b"x" * (MAX_LINE_BYTES + 1))
    with pytest.raises(Garbage):
        await found(b"<html>\n\n")


async def test_a_line_of_an_event_is_measured_once(monkeypatch):
    """Each one measured all before it."""
    measured = []
    monkeypatch.setattr(wire_events, "len", lambda value: measured.append(0) or len(value), raising=False)
    assert await found(b"data: x\n" * 500 + b"\n") == [b"\n".join([b"x"] * 500)]
    assert len(measured) < 1100


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@given(data=JSON | st.binary(max_size=40))
def test_any_event_of_a_stranger_is_read_or_refused(kind, data):
    reader = kinds.of(kind).reader(ASK)
    try:
        raw = data if isinstance(data, bytes) else json.dumps(data).encode()
        chunks = reader.read(raw)
    except (Garbage, Failure):
        return
    assert all(0 <= chunk.index < 2 for chunk in chunks)


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_an_event_that_is_no_utf_8_is_garbage(kind):
    """Its error was nobody's: the attempt counted for no breaker, and one that tried alone was never over."""
    with pytest.raises(Garbage):
        kinds.of(kind).reader(ASK).read(b'{"choices":[{"index":0,"delta":{"content":"\xff\xfe"}}]}')
    assert of_status(400, {}, b'{"error":{"message":"\xff"}}').blame == "client"


@given(JSON)
def test_a_usage_is_counts_or_none(value):
    stated = stated_of(value)
    assert stated is None or all(isinstance(n, int) and n >= 0 for n in (stated.usage.prompt, stated.usage.output))


def test_cached_tokens_are_a_part_of_the_prompt():
    usage = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 99}}
    stated = stated_of(usage)
    assert stated is not None
    assert stated.usage == Usage(10, 0, 0, 2)


@pytest.mark.parametrize("arguments", ['{"a": 1', " ", "[" * 100_000])
def test_arguments_that_are_no_json_are_refused_before_a_provider_is_asked(arguments: str) -> None:
    """A model that was cut wrote them. The attempt ended without a word, and its upstream stayed on trial for ever."""
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(ApiError) as found:
        anthropic.check(Ask("chat", {"messages": messages}, 1, 10, Interval(0, 1, 100)))
    assert (found.value.status, found.value.param) == (400, "messages[1].tool_calls[0].function.arguments")


def test_a_vector_or_a_cost_of_a_stranger_is_garbage_and_no_fault() -> None:
    with pytest.raises(Garbage):
        _vector("\u00e9")
    assert [_micro_units(cost) for cost in (10**400, float("nan"), float("inf"), -1, "1", 0.5)] == [None] * 5 + [
        500_000
    ]


@pytest.mark.parametrize("given", ["chat\x00cmpl\u2028-1\n", "chatcmpl-1"])
def test_an_id_has_only_what_every_database_takes(given: str) -> None:
    """A NUL in it made the charge one that PostgreSQL never takes."""
    events = {
        "openai": {"id": given, "choices": [{"index": 0, "delta": {"content": "a"}}]},
        "anthropic": {"type": "message_start", "message": {"id": given}},
    }
    for kind, event in events.items():
        chunks = kinds.of(kind).reader(ASK).read(json.dumps(event).encode())
        assert [one.provider_id for one in chunks if one.provider_id] == ["chatcmpl-1"]
    assert id_of(5) == id_of(None) == ""
    assert id_of("a" * 200) == "a" * 128


def asked(**body):
    tools = [{"type": "function", "function": {"name": "f", "strict": body.pop("strict", None)}}]
    return Ask(
        "chat", {"messages": [{"role": "user", "content": "hi"}], "tools": tools} | body, 1, 10, Interval(0, 1, 9)
    )


@pytest.mark.parametrize("choice", [{"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}])
def test_a_chosen_tool_has_its_name_in_messages(choice):
    ask = asked(tool_choice=choice)
    anthropic.check(ask)
    assert anthropic.message_body(ask)["tool_choice"] == {"type": "tool", "name": "f"}


def test_what_messages_cannot_say_of_tools_is_refused():
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "name": "f"}]}}
    for body, param in (({"tool_choice": allowed}, "tool_choice"), ({"strict": True}, "tools[0].function.strict")):
        with pytest.raises(ApiError) as caught:
            anthropic.check(asked(**body))
        assert (caught.value.status, caught.value.param) == (400, param)


def anthropic_events(*events):
    reader = kinds.of("anthropic").reader(ASK)
    return [chunk for event in events for chunk in reader.read(json.dumps(event).encode())]


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
    ],
)
def test_a_stop_reason_of_messages_has_a_finish(reason, finish):
    chunks = anthropic_events({"type": "message_delta", "delta": {"stop_reason": reason}})
    assert [chunk.finish for chunk in chunks if chunk.finish] == [finish]


def test_an_event_that_messages_has_got_since_is_passed_over():
    """Anthropic says that events may be added; the answer was garbage then, for each tenant."""
    assert anthropic_events({"type": "new_event"}, {}) == []


def test_a_count_that_messages_states_as_null_is_the_earlier_one():
    start = {"type": "message_start", "message": {"id": "a", "usage": {"input_tokens": 50, "output_tokens": 1}}}
    end = {
        "type": "message_delta",
        "delta": {"stop_reason": "end_turn"},
        "usage": {"input_tokens": None, "output_tokens": 5},
    }
    stated = [chunk.stated for chunk in anthropic_events(start, end) if chunk.stated]
    assert stated[-1].usage == Usage(uncached=50, output=5)


@pytest.mark.parametrize(
    "value", ["", "AAAAAAA=", "AADAfw==", "AACAfw==", [], [float("nan")], [float("inf")], [1e39], [True, "a"]]
)
def test_a_vector_that_is_none_is_garbage(value):
    """It was delivered and charged, and could not be written: no number of bytes that are floats, or not finite."""
    with pytest.raises(Garbage):
        _vector(value)


def test_a_vector_of_a_stranger_is_its_floats():
    assert _vector([1, 0.5]) == _vector("AACAPwAAAD8=") == array("f", [1, 0.5]).tobytes()


def called(*deltas):
    """Returns the calls that deltas of one choice become, as (index, id, name, arguments)."""
    reader = kinds.of("openai").reader(ASK)
    found = []
    for delta in deltas:
        event = {"choices": [{"index": 0, "delta": {"tool_calls": [delta]}}]}
        found += [call for chunk in reader.read(json.dumps(event).encode()) for call in chunk.calls]
    return [(one.index, one.id, one.name, one.arguments) for one in found]


def test_a_call_has_its_name_once_however_often_the_provider_says_it():
    """Each time was a call of its own for the client."""
    first = {"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}}
    rest = {"index": 0, "id": "a", "function": {"name": "f", "arguments": ": 1}"}}
    assert called(first, rest) == [(0, "a", "f", '{"x"'), (0, "", "", ": 1}")]
    with pytest.raises(Garbage):
        called(first, {"index": 0, "function": {"name": "g"}})


def test_calls_that_a_provider_does_not_number_are_told_apart():
    """All of them were one, whose arguments were no JSON."""
    whole = [{"id": name, "function": {"name": "f", "arguments": "{}"}} for name in ("a", "b")]
    assert called(*whole) == [(0, "a", "f", "{}"), (1, "b", "f", "{}")]
    assert called(*[{"function": one["function"]} for one in whole]) == [(0, "", "f", "{}"), (1, "", "f", "{}")]
    pieces = [{"id": "a", "function": {"name": "f", "arguments": one}} for one in ("{", "}")]
    assert called(*pieces, {"function": {"arguments": " "}}) == [(0, "a", "f", "{"), (0, "", "", "}"), (0, "", "", " ")]
