"""Parsers of models' outputs: golden transcripts, cut in every way."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, note
from hypothesis import strategies as st
from transcripts import NAMES, TOOLS, TRANSCRIPTS, Transcript

from gateway.parsers.dialects import DIALECTS, STYLES, OutputSyntax
from gateway.parsers.parts import CallArguments, CallBegin, Folded, OutputParser, Part, Reasoning, Text
from gateway.schema.tools import FunctionTool, Tools

ALL = pytest.mark.parametrize("given", TRANSCRIPTS, ids=[one.name for one in TRANSCRIPTS])


MARKS = {
    **dict.fromkeys(("hermes", "qwen3_coder", "glm"), "<tool_call>"),
    **dict.fromkeys(("deepseek", "deepseek_v31"), "<｜tool▁call▁begin｜>"),
    **dict.fromkeys(("mistral", "mistral_named"), "[TOOL_CALLS]"),
    **dict.fromkeys(("llama", "pythonic"), "<|python_tag|>"),
    "seed_oss": "<seed:tool_call>",
    "longcat": "<longcat_tool_call>",
    "deepseek_v32": '<｜DSML｜invoke name="',
    "minimax_m2": "<minimax:tool_call>",
    "kimi": "<|tool_call_begin|>",
    "granite": "<|tool_call|>",
    "cohere": "<|START_ACTION|>",
}
"""What stands in front of a call, by dialect. The other formats have no mark there."""


def parser(given: Transcript, tools: Tools = TOOLS) -> OutputParser:
    return OutputSyntax(DIALECTS[given.dialect], STYLES[given.style]).parser(tools, given.is_open)()


def parsed(given: Transcript, cuts: Sequence[int] = (), tools: Tools = TOOLS) -> tuple[list[Part], OutputParser]:
    """All parts of a transcript that comes cut at these places."""
    one, parts = parser(given, tools), []
    for start, end in zip([0, *cuts], [*cuts, len(given.output)], strict=True):
        parts += one.push(given.output[start:end])
    return [*parts, *one.end()], one


def plain(parts: Sequence[Part]) -> list[Any]:
    """The parts without ids, neighbours of one kind joined."""
    found: list[Any] = []
    for part in parts:
        match part:
            case Text(text) | Reasoning(text):
                kind: Any = type(part)
            case CallBegin(index, _, name):
                found.append([CallBegin, index, name])
                continue
            case CallArguments(index, text):
                kind = (CallArguments, index)
        if found and found[-1][0] == kind:
            found[-1][1] += text
        else:
            found.append([kind, text])
    return found


@ALL
def test_a_transcript_means_what_its_model_meant(given: Transcript) -> None:
    parts, one = parsed(given)
    folded = Folded.of(parts)
    assert folded.text == given.text
    assert folded.reasoning == given.reasoning
    assert [(begin.name, json.loads(text)) for begin, text in folded.calls] == given.calls
    assert one.has_calls == bool(given.calls)
    assert len({begin.id for begin, _ in folded.calls}) == len(given.calls)
    assert [begin.index for begin, _ in folded.calls] == list(range(len(given.calls)))


@ALL
def test_no_cut_changes_a_part(given: Transcript) -> None:
    whole = plain(parsed(given)[0])
    for cut in range(1, len(given.output)):
        assert plain(parsed(given, [cut])[0]) == whole, given.output[:cut]
    assert plain(parsed(given, range(1, len(given.output)))[0]) == whole


@given(st.sampled_from(TRANSCRIPTS), st.data())
def test_no_cuts_change_a_part(given: Transcript, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(given.output)), max_size=8).map(sorted))
    assert plain(parsed(given, cuts)[0]) == plain(parsed(given)[0])


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<function=now>",
    "</function>",
    "<parameter=a>",
    '{"name": "now", "arguments": {}}',
    '{"name": "now", "arguments": {',
    "[TOOL_CALLS]",
    "[now()",
    "<|python_tag|>",
    "<think>",
    "</think>",
    "<|channel|>final",
    "<|message|>",
    "<|end|>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<|tool_call|>",
    "<｜DSML｜tool_calls>",
    '<｜DSML｜invoke name="now">',
    '<｜DSML｜parameter name="a" string="false">',
    "</｜DSML｜invoke>",
    "<minimax:tool_call>",
    '<invoke name="now">',
    "</minimax:tool_call>",
    "<|START_ACTION|>",
    "<start_function_call>",
    "call:now{",
    "<escape>",
    "<|tool_call_start|>",
    "<function_calls>",
    "now()",
    "[",
    "{",
    '"',
    "\\",
    " ",
    "\n",
    "a",
]


@given(st.sampled_from(sorted(DIALECTS)), st.sampled_from(sorted(STYLES)), st.lists(st.sampled_from(PIECES)), st.data())
def test_a_confused_output_is_read_the_same_however_it_is_cut(
    dialect: str, style: str, pieces: list[str], data: st.DataObject
) -> None:
    output = "".join(pieces)
    one = Transcript("", dialect, output, style=style)
    cuts = data.draw(st.lists(st.integers(0, len(output)), max_size=8).map(sorted))
    parts, _ = parsed(one, cuts)
    assert plain(parts) == plain(parsed(one)[0])
    assert all(begin.name in NAMES for begin, _ in Folded.of(parts).calls)


@given(
    st.sampled_from(sorted(set(DIALECTS) - {"harmony", "granite"})), st.text("<|tool_cal>[]{}\"' \nax=/", max_size=60)
)
def test_an_output_without_a_call_keeps_every_character(dialect: str, output: str) -> None:
    parts, _ = parsed(Transcript("", dialect, output))
    assert Folded.of(parts).text == output


@ALL
def test_one_call_at_most_if_only_one_is_allowed(given: Transcript) -> None:
    tools = Tools(TOOLS.functions, "auto", NAMES, parallel=False)
    parts, one = parsed(given, range(1, len(given.output)), tools)
    calls = Folded.of(parts).calls
    assert [(begin.name, json.loads(text)) for begin, text in calls] == given.calls[:1]
    assert one.is_over == bool(given.calls)


@ALL
def test_arguments_come_before_the_call_is_complete(given: Transcript) -> None:
    """No call waits for the answer's end: with its last character cut off, a client has nearly all of it."""
    if not given.calls or given.dialect == "pythonic" or "[get" in given.output or ".call(" in given.output:
        return
    one = parser(given)
    begun = [part for part in one.push(given.output) if isinstance(part, CallBegin)]
    assert len(begun) == len(given.calls)


def test_a_call_that_was_cut_is_not_complete() -> None:
    cut = TRANSCRIPTS[0].output[:-20]
    parts, one = parsed(Transcript("", "hermes", cut))
    assert [begin.name for begin, _ in Folded.of(parts).calls] == ["get_weather"]
    assert not one.has_calls


def test_other_json_does_not_wait_for_its_end() -> None:
    one = parser(Transcript("", "llama", ""))
    assert one.push('{"answer": [1') == [Text('{"answer": [1')]
    assert one.push(", 2]") == [Text(", 2]")]


def test_channels_without_a_header_do_not_wait_for_one() -> None:
    one = parser(Transcript("", "harmony", ""))
    assert one.push("Only text, ") == [Text("Only text,")]
    assert one.push("and more") == [Text(" and more")]


def test_the_reasoning_s_ranges_in_channels() -> None:
    output = "<|channel|>analysis<|message|>ab<|end|><|start|>assistant<|channel|>final<|message|>c"
    _, one = parsed(Transcript("", "harmony", output))
    assert list(one.reasoning) == [(0, output.index("<|start|>"))]


@pytest.mark.parametrize(
    ("dialect", "output"),
    [
        ("harmony", "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{{}}<|call|>"),
        ("pythonic", "[{}()]"),
    ],
)
def test_the_longest_name_of_a_tool_is_called(dialect: str, output: str) -> None:
    name = "a" * 128
    tools = Tools([FunctionTool(name)], "auto", frozenset([name]))
    parts, _ = parsed(Transcript("", dialect, output.format(name)), (), tools)
    assert [begin.name for begin, _ in Folded.of(parts).calls] == [name]


def test_only_allowed_tools_are_called() -> None:
    tools = Tools(TOOLS.functions, "auto", frozenset({"now"}))
    parts, one = parsed(TRANSCRIPTS[0], (), tools)
    assert Folded.of(parts).text == TRANSCRIPTS[0].output and not one.has_calls


def test_the_reasoning_s_range_has_its_tags() -> None:
    output = "<think>\nab\n</think>\n\nc"
    _, one = parsed(Transcript("", "hermes", output, style="think"))
    assert list(one.reasoning) == [(0, len("<think>\nab\n</think>"))]
    _, one = parsed(Transcript("", "hermes", "ab", style="think", is_open=True))
    assert list(one.reasoning) == [(0, None)]


ONLY_LIKE_A_CALL = "pythonic, no literal"
"""This transcript is a call with its name up to nearly its end, and whole it is a text: a cut one has the call."""


def cut(given: Transcript, place: int, *, one_by_one: bool) -> Folded:
    """What a client has of a transcript that ends at `place` because no more tokens were allowed."""
    one, output = parser(given), given.output[:place]
    parts = [part for piece in (output if one_by_one else [output]) for part in one.push(piece)]
    return Folded.of([*parts, *one.end(is_cut=True)])


@ALL
@pytest.mark.parametrize("one_by_one", [False, True], ids=["whole", "streamed"])
def test_an_answer_that_was_cut_is_a_prefix_of_the_whole_one(given: Transcript, one_by_one: bool) -> None:
    whole = Folded.of(parsed(given)[0])
    for place in range(len(given.output) + 1):
        found = cut(given, place, one_by_one=one_by_one)
        assert whole.text.startswith(found.text), (given.output[:place], found.text)
        assert whole.reasoning.startswith(found.reasoning), (given.output[:place], found.reasoning)
        if given.name == ONLY_LIKE_A_CALL:
            continue
        assert len(found.calls) <= len(whole.calls)
        for i, (begin, arguments) in enumerate(found.calls):
            name, complete = whole.calls[i][0].name, whole.calls[i][1]
            assert begin.name == name and complete.startswith(arguments), (given.output[:place], arguments)
            assert arguments == complete or i == len(found.calls) - 1, given.output[:place]


@ALL
def test_a_cut_behind_the_last_character_takes_no_call(given: Transcript) -> None:
    found = cut(given, len(given.output), one_by_one=True)
    assert [(begin.name, json.loads(text)) for begin, text in found.calls] == given.calls


@pytest.mark.parametrize(
    ("dialect", "output"),
    [
        ("hermes", '<tool_call>\n{"name": "get_weather"'),
        ("hermes", '<tool_call>\n{"name": "get_weather", "arguments": "{'),
        ("llama", '<|python_tag|>get_weather.call(city="Pa'),
        ("pythonic", "[get_weather(city='Pa"),
        ("mistral_named", "[TOOL_CALLS]get_weather[ARGS]"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="get_weather"'),
        ("glm", "<tool_call>get_weather\n"),
        ("gemma4", "<|tool_call>call:get_weather{"),
    ],
)
def test_a_call_that_was_cut_behind_its_name_is_begun(dialect: str, output: str) -> None:
    given = Transcript("", dialect, output)
    found = cut(given, len(output), one_by_one=False)
    assert [begin.name for begin, _ in found.calls] == ["get_weather"] and not found.text


@pytest.mark.parametrize(
    "given", [one for one in TRANSCRIPTS if one.calls and one.dialect in MARKS], ids=lambda one: one.name
)
def test_a_bare_mark_behind_calls_is_no_text(given: Transcript) -> None:
    """The model began a further call and ended. A mark with something behind it is text, as before."""
    mark = MARKS[given.dialect]
    for end, text in ((mark, given.text), (f"\n{mark}", given.text), (f"{mark}?", f"{given.text}{mark}?")):
        folded = Folded.of(parsed(dataclasses.replace(given, output=given.output + end))[0])
        assert ("".join(folded.text.split()), len(folded.calls)) == ("".join(text.split()), len(given.calls)), end


def test_a_bare_mark_without_a_call_before_it_is_text() -> None:
    one = OutputSyntax(DIALECTS["hermes"], STYLES["none"]).parser(TOOLS, False)()
    assert Folded.of([*one.push("Write <tool_call>"), *one.end()]).text == "Write <tool_call>"


@pytest.mark.parametrize(
    ("dialect", "output", "arguments"),
    [
        ("hermes", r'<tool_call>{"name": "now", "arguments": "{\"a\": \"\\ud800\"}"}</tool_call>', {"a": "\ufffd"}),
        ("pythonic", r'[now(a="\ud800\udc00 \ud83d")]', {"a": "\ufffd\ufffd \ufffd"}),
        ("pythonic", "[now(a=0x" + 4000 * "f" + ")]", None),
        ("pythonic", "[now(a=1e999)]", None),
        ("hermes", '<tool_call>{"arguments": {"a": NaN}, "name": "now"}</tool_call>', None),
        (
            "qwen3_coder",
            '<tool_call><function=get_weather><parameter=places>["\\ud800"]</parameter></function></tool_call>',
            {"places": ["\ufffd"]},
        ),
        (
            "qwen3_coder",
            "<tool_call><function=get_weather><parameter=days>1e999</parameter></function></tool_call>",
            {"days": "1e999"},
        ),
    ],
)
def test_what_json_or_utf_8_cannot_say_ends_no_answer(dialect: str, output: str, arguments: Any) -> None:
    """It raised while the answer was written: a stream was free then, and a body was charged and was a 500."""
    one = OutputSyntax(DIALECTS[dialect], STYLES["none"]).parser(TOOLS, False)()
    folded = Folded.of([*one.push(output), *one.end()])
    msgspec.json.encode([folded.text, [text for _, text in folded.calls]])
    assert [json.loads(text) for _, text in folded.calls] == ([] if arguments is None else [arguments])


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_arguments_that_no_client_can_read_are_no_whole_call(number: str) -> None:
    one = OutputSyntax(DIALECTS["hermes"], STYLES["none"]).parser(TOOLS, False)()
    one.push('<tool_call>{"name": "now", "arguments": {"a": ' + number + "}}</tool_call>")
    one.end()
    assert not one.has_calls


def test_a_cut_in_what_was_no_call_begins_none() -> None:
    """The name of an offered tool is forgotten with the text that only looked like a call."""
    given = Transcript("", "hermes", '<tool_call>{"name": "now", "x": 1} and then')
    found = cut(given, len(given.output), one_by_one=True)
    assert (found.text, found.calls) == (given.output, [])


def test_white_space_before_a_cut_stays_where_no_call_may_follow() -> None:
    one = parser(Transcript("", "hermes", "", style="think"), Tools((), "none", frozenset()))
    assert Folded.of([*one.push("<think>Hm.</think>So \n"), *one.end(is_cut=True)]).text == "So \n"


ANY_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.sampled_from(["string", "integer"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["type", "anyOf", "oneOf", "enum", "city", "properties"]), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(schema=st.dictionaries(st.sampled_from(["type", "anyOf", "oneOf", "enum"]), ANY_JSON), whole=ANY_JSON)
def test_no_schema_of_a_client_breaks_a_parser(schema, whole):
    """Of all transcripts, because drawing a schema takes longer than to parse one."""
    for parameters in ({"properties": {"city": schema, "days": schema}}, {"properties": whole}):
        functions = tuple(FunctionTool(name, None, parameters) for name in NAMES)
        for transcript in TRANSCRIPTS:
            note(transcript.name)
            parts, _ = parsed(transcript, tools=Tools(functions, "auto", NAMES))
            for _, arguments in Folded.of(parts).calls:
                arguments.encode()


def test_the_name_of_an_argument_is_never_half_a_pair():
    call = '<|tool_call>call:get_weather{"\\ud800": 1}<tool_call|>'
    parts, _ = parsed(Transcript("gemma", "gemma4", call))
    assert json.loads(Folded.of(parts).calls[0][1]) == {"\ufffd": 1}
