"""Calls as JSON behind marks of their own: Mistral, Granite, DeepSeek, Kimi, Cohere, and lists between two marks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from gateway.parsers import json_call
from gateway.parsers.scan import Format, Scan, Wait, behind

TOOL_CALLS = "[TOOL_CALLS]"
ACTION = ("<|START_ACTION|>", "<|END_ACTION|>")
COHERE_TEXT = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")
COMMAND_R = ("Action: ```json", "```")
PLUGIN = "<|plugin|>"
INTERNLM = ("<|action_start|>", "<|action_end|>")
NEMOTRON = ("<TOOLCALL>", "</TOOLCALL>")
JAMBA = ("<tool_calls>", "</tool_calls>")
FUNCTOOLS = ("functools", "")
GRANITE = "<|tool_call|>"


def _mistral_call(scan: Scan, _: str) -> Wait[bool]:
    yield from scan.spaces()
    if (yield from scan.peek()) in ("[", "{"):
        return (yield from _list(scan, ""))
    name = (yield from scan.word("[{ \n")).strip()
    if not scan.takes_name(name):
        return False
    if (yield from scan.accept("[CALL_ID]")):
        yield from scan.word("[")
    yield from scan.accept("[ARGS]")
    yield from scan.spaces()
    if (yield from scan.peek()) != "{":
        return False
    yield from json_call.arguments(scan, name)
    return True


mistral = behind((TOOL_CALLS,), _mistral_call)
"""The format `[TOOL_CALLS][{…}, …]` and the newer `[TOOL_CALLS]name[ARGS]{…}`, with or without `[CALL_ID]…`."""


def _list(scan: Scan, end: str) -> Wait[bool]:
    """Reads a list of calls, or one call without a list."""
    is_list = yield from scan.accept("[")
    yield from scan.spaces()
    if not (yield from json_call.calls(scan, (",",), "]" if is_list else "")):
        return False
    if end:
        yield from scan.spaces()
        yield from scan.accept(end)
    return True


def listed(marks: tuple[str, str], around_text: tuple[str, ...] = ()) -> Format:
    """Returns the format of a list of calls, or of one call, between two marks. Tags around a text are no part of it."""
    begin, end = marks
    return behind((begin,), partial(_listed, end), around_text)


def _listed(end: str, scan: Scan, _: str) -> Wait[bool]:
    yield from scan.spaces()
    if (yield from scan.accept(PLUGIN)):
        yield from scan.spaces()
    return (yield from _list(scan, end))


granite = listed((GRANITE, "<|/tool_call|>"), ("<response>", "</response>"))
"""The format of Granite 3 and Phi-4-mini; Granite 3.3 wraps a text in `<response>`."""
cohere = listed(ACTION, COHERE_TEXT)
"""The format of Command R7B and later, with the members `tool_name` and `parameters`."""


@dataclass(frozen=True)
class Marks:
    """The marks around a section of calls, around a call, and between its name and its arguments."""

    section: str
    call: str
    between: str
    call_end: str
    section_end: str


DEEPSEEK = Marks(
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
)
KIMI = Marks(
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)


def _marked_call(marks: Marks, scan: Scan, tag: str) -> Wait[bool]:
    if tag == marks.section:
        yield from scan.spaces()
        if not (yield from scan.accept(marks.call)):
            return False
    head = yield from scan.word(marks.between[0])
    if not (yield from scan.accept(marks.between)):
        return False
    name = head.strip().removeprefix("functions.").partition(":")[0]
    yield from scan.spaces()
    is_fenced = (yield from scan.peek()) != "{"
    if is_fenced:
        name = (yield from scan.word("\n")).strip()
        yield from scan.spaces()
        yield from scan.accept("```json")
        yield from scan.spaces()
    if not scan.takes_name(name) or (yield from scan.peek()) != "{":
        return False
    yield from json_call.arguments(scan, name)
    yield from scan.spaces()
    if is_fenced and (yield from scan.accept("```")):
        yield from scan.spaces()
    yield from scan.accept(marks.call_end)
    return True


def _sections(marks: Marks) -> Format:
    return behind((marks.section, marks.call), partial(_marked_call, marks), (marks.section_end,))


deepseek = _sections(DEEPSEEK)
"""Both formats: V3 and R1 write a kind, a name and fenced JSON; V3.1 writes the name and JSON."""
kimi = _sections(KIMI)
"""The format in which a name is written `functions.name:0`."""
